"""Sums of gradients on their way between ranks, in one process: what stands for the other ranks answers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

import megatrain
from megatrain.memory.host_arena import HostArena
from megatrain.passes.program import Block, Program
from megatrain.ranks.channels import Channel, GoOn, Room, room_bytes
from megatrain.runtime.rank_sums import RankSums
from megatrain.scheduler.step_kind import StepKind
from megatrain.tracer.spec import TensorSpec
from tests.simulated_runs.on_device import DEVICE, on_device
from tests.training.parity import TASKS


class Answering(Channel):
    """A channel of one room. What is given is kept, and what is taken are other numbers each time."""

    def __init__(self) -> None:
        self.got: list[torch.Tensor] = []
        self._arena = HostArena(0)
        self._count = 0

    def expect(self, blocks: Sequence[Sequence[TensorSpec]]) -> None:
        """Makes the room once."""
        super().expect(blocks)
        if not self._arena.nbytes:
            self._arena = HostArena(max(map(room_bytes, blocks)))

    @contextmanager
    def give(self, block: int, go_on: GoOn) -> Generator[Room]:
        """Keeps what is there."""
        room = Room.of(self._arena, self.blocks[block])
        yield room
        self.got += [tensor.clone() for tensor, is_there in zip(room.tensors, room.present, strict=True) if is_there]

    @contextmanager
    def take(self, block: int, go_on: GoOn) -> Generator[Room]:
        """Fills all but the last."""
        room = Room.of(self._arena, self.blocks[block])
        self._count += 1
        for number, tensor in enumerate(room.tensors):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 100 * self._count + number)
        room.present = [number < len(room.tensors) - 1 for number in range(len(room.tensors))]
        yield room


class OtherRanks:
    """All that sums ask of ranks."""

    place = "middle"

    def __init__(self) -> None:
        self.agreed = threading.Event()
        self.host = None
        self.before, self.after, self.totals = Answering(), Answering(), Answering()

    def wait_until_agreed(self, go_on: Callable[[], object]) -> None:
        """All agree."""


def passed() -> Sequence[torch.Tensor]:
    """Sums of all blocks come, are added to, and go on: whole ahead of a second micro-batch, or in pieces."""
    task = TASKS["stack"]
    compiled = megatrain.compile(task.build(), device=DEVICE, block_bytes=1).megatrain
    program = compiled.prepare(on_device(task.batch(0, 2))).lowered.program
    others: Any = OtherRanks()
    compiled.engine.ranks = others
    made = list[torch.Tensor]()
    for micro_batches in (2, 1):
        sides: list[RankSums] = []
        for others.place in ("middle", "last"):
            kind = StepKind(micro_batches=micro_batches, outputs="release", ranks=others.place)
            sides.append(RankSums(compiled.engine, program, kind))
        middle, last = sides
        calls: list[Any] = [SimpleNamespace(received={}, parameter_gradients={}) for _ in sides]
        for block in program.blocks:
            for side, call in zip(sides, calls, strict=True):
                call.received[block.index] = side.empty(block.index)
            if micro_batches == 2:
                middle.receive(calls[0], block.index)
        for block in program.blocks:
            found = calls[0].received[block.index] if micro_batches == 2 else _own(program, block)
            for call in calls:
                call.parameter_gradients[block.index] = [(t if t is None else t * 2 + 1, False) for t in found]
            middle.pass_on(calls[0], block.index)
            for side, call in ((last, calls[1]), (middle, calls[0])):
                with side.totals(call, block.index) as totals:
                    made += [tensor.clone() for tensor, _ in totals if tensor is not None]
            made += [tensor.clone() for tensor in found if tensor is not None]
    return [*others.after.got, *others.totals.got, *made]


def _own(program: Program, block: Block) -> list[torch.Tensor | None]:
    """Gradients of a block on the device."""
    entries = [program.state[key] for key in block.binding]
    return [torch.full(e.spec.shape, 3.0, device=DEVICE) if e.requires_grad else None for e in entries]
