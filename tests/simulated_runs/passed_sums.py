"""Sums of gradients on their way between ranks, in one process: what stands for the other ranks answers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

import megatrain
from megatrain.runtime.gradients.rank_sums import RankSums
from megatrain.scheduler.step_kind import StepKind
from tests.simulated_runs.on_device import DEVICE, on_device
from tests.training.parity import TASKS


class OtherRanks:
    """Sends other numbers each time, and keeps what it gets."""

    place = "middle"

    def __init__(self) -> None:
        self.agreed = threading.Event()
        self.got: list[torch.Tensor] = []
        self._count = 0

    def wait_until_agreed(self, go_on: Callable[[], object]) -> None:
        """All agree."""

    def take(self, out: Sequence[torch.Tensor], go_on: Callable[[], object]) -> list[bool]:
        """Fills all but the last."""
        self._count += 1
        for number, tensor in enumerate(out[:-1]):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 100 * self._count + number)
        return [*[True] * (len(out) - 1), False]

    gather = take

    def pass_on(self, tensors: Sequence[torch.Tensor | None], specs: Any, go_on: Callable[[], object]) -> None:
        """Keeps what is there."""
        self.got += [tensor.clone() for tensor in tensors if tensor is not None]

    spread = pass_on


def passed() -> Sequence[torch.Tensor]:
    """Sums of all blocks come, are added to, and go on."""
    task = TASKS["stack"]
    compiled = megatrain.compile(task.build(), device=DEVICE, block_bytes=1).megatrain
    program = compiled.prepare(on_device(task.batch(0, 2))).lowered.program
    others: Any = OtherRanks()
    compiled.engine.ranks = others
    sums, made = RankSums(compiled.engine, program, StepKind()), list[torch.Tensor]()
    came = [sums.receive(sums.empty(block.index)) for block in program.blocks]
    for block, received in zip(program.blocks, came, strict=True):
        added = [(None if tensor is None else tensor * 2 + 1, False) for tensor, _ in received]
        sums.pass_on(block.index, added)
        totals = sums.spread(block.index, added)
        made += [tensor.clone() for tensor, _ in (*received, *totals, *sums.total(block.index)) if tensor is not None]
    return [*others.got, *made]
