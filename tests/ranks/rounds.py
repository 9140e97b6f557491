"""What ranks do whose devices have dealt blocks: functions that processes run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import megatrain
from megatrain.integrations.hf.several import refuse_dealt
from megatrain.optim.block_update import MasterStep
from megatrain.ranks import signs_of_life
from megatrain.runtime.streams.stream_set import Chaos
from megatrain.tracer.recording import effect_watch
from tests.ranks.failing import refused
from tests.ranks.sides import Case, begin, branching, branching_batch
from tests.training.parity import seeded_stack, square, stack_batch
from tests.training.test_draws import Own

ROUND: dict[str, Any] = {"across_devices": "round"}
CASE = Case("stack", "overlap", [(1, 1, 1)] * 4, compile=ROUND)


def _step(model: nn.Module, *, compiled: dict[str, Any] | None = None, **options: Any) -> megatrain.TrainStep:
    made = megatrain.compile(model, device="cpu", process_group=dist.group.WORLD, **ROUND, **(compiled or {}))
    return megatrain.TrainStep(made, torch.optim.SGD(model.parameters(), lr=0.1), loss=square, **options)


class Leaving(nn.Module):
    """Leaves a result of its first layer in an attribute."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            self.seen = x.detach()
        return x


class Returning(nn.Module):
    """Returns what its first layer has made as well."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x).tanh()
        return x, first


def refused_rounds(rank: int) -> list[str]:
    """What is refused where blocks are dealt."""
    given = stack_batch(rank, 2)
    torch.manual_seed(0)
    dropping = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)) for _ in range(4)])
    drawing = nn.Sequential(Own(lambda: torch.rand(())), *[nn.Linear(16, 16) for _ in range(3)])
    hooked = _step(seeded_stack(4))
    hooked._optimizers[0].register_step_post_hook(lambda *_: None)
    few = _step(nn.Linear(3, 3))
    plain = _step(seeded_stack(4))
    compiled = megatrain.compile(seeded_stack(4), device="cpu", process_group=dist.group.WORLD, **ROUND)
    rounded = {"precision": "bf16", "masters": "rounded"}
    both = _step(Returning())
    both._setup._loss = both._taking._loss = _both
    assert ", blocks dealt to devices" in str(compiled)
    return [
        refused_hidden(lambda: _step(dropping)(given)),
        refused(lambda: _step(drawing)(torch.ones(2, 16))),
        refused(lambda: _step(branching())(branching_batch(1, 2))),
        refused(lambda: _step(Leaving())(given)),
        refused(lambda: both(given)),
        refused(lambda: few(given)),
        refused(lambda: hooked(given)),
        refused(lambda: _step(seeded_stack(4), compiled=rounded)),
        refused(lambda: plain((given, threading.Lock()))),
        refused(lambda: plain.prepare(given)),
        refused(lambda: refuse_dealt(compiled)),
        refused(lambda: plain(given)),
    ]


def refused_hidden(work: Callable[[], object]) -> str:
    """What is raised where dropout's kernel on the CPU passes for one of a library with a generator of its own."""
    before = effect_watch._RNNS, effect_watch._has_dropout
    effect_watch._RNNS, effect_watch._has_dropout = ("aten::bernoulli_",), lambda *_: True  # pyright: ignore
    try:
        return refused(work)
    finally:
        effect_watch._RNNS, effect_watch._has_dropout = before  # pyright: ignore


def _both(result: Any, batch: Any) -> torch.Tensor:
    return result[0].square().mean() + result[1].square().mean()


class Frozen(nn.Module):
    """Only its last layer is trained, so that some ranks train nothing."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.layers[:3].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def frozen_round(rank: int) -> list[Any]:
    """Losses, norms and weights of two clipped steps, and what a call and a plain copy of the model compute then."""
    model = Frozen()
    compiled = megatrain.compile(model, device="cpu", process_group=dist.group.WORLD, **ROUND)
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=0.1), loss=square, max_grad_norm=0.01)
    found: list[Any] = [step(stack_batch(10 * number + rank, 2)) for number in range(2)]
    found += [step.progress.grad_norm, *(p.detach().clone() for p in model.parameters())]
    with torch.no_grad():
        found.append(compiled(stack_batch(7, 2)))
    return found


def frozen_alone(size: int) -> list[Any]:
    """The same of so many ranks in one process."""
    model = Frozen()
    compiled = megatrain.compile(model, device="cpu")
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=0.1), loss=square, max_grad_norm=0.01)
    found: list[Any] = [step([stack_batch(10 * n + rank, 2) for rank in range(size)]) for n in range(2)]
    found += [step.progress.grad_norm, *(p.detach().clone() for p in model.parameters())]
    with torch.no_grad():
        found.append(compiled(stack_batch(7, 2)))
    return found


def failing_early_round(rank: int) -> tuple[list[str], int]:
    """Rank 1 gives no batch once, then one that can't be captured; then all go on."""
    step = begin(CASE, dist.group.WORLD)[2]
    texts: list[str] = []
    for number in range(4):
        bad: dict[int, Any] = {1: [], 2: [torch.zeros(2, 99)]}
        given = bad[number] if rank == 1 and number in bad else CASE.batches(number)[rank]
        texts.append(refused(lambda given=given: step(given)))
    return texts, step.progress.count


def failing_round(rank: int, op: str) -> tuple[str, str]:
    """An op of rank 1 fails; then there is another step."""
    chaos = Chaos(max_delay_s=0, fail=op) if rank == 1 else None
    case = replace(CASE, compile={**ROUND, "chaos": chaos, "transfer": "copy"})
    _, _, step = begin(case, dist.group.WORLD)
    return refused(lambda: step(case.batches(0)[rank])), refused(lambda: step(case.batches(1)[rank]))


def dying_round(rank: int, when: str, silent_s: float, case: Case = CASE) -> str:
    """Rank 1 is killed at some place."""
    signs_of_life.SILENT_S = silent_s
    _, _, step = begin(case, dist.group.WORLD)
    step(case.batches(0)[rank])
    if rank == 1:
        kill: Any = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        if when == "update":
            MasterStep.__call__ = kill
        elif when == "values":
            step._taking._together._compiled.engine.ranks.mailbox.give = kill  # pyright: ignore
        else:
            os.kill(os.getpid(), signal.SIGSTOP if when == "still" else signal.SIGKILL)
    return refused(lambda: step(case.batches(1)[rank]))


def nonfinite_round(rank: int) -> list[Any]:
    """The second step has gradients that aren't finite; it is skipped by all."""
    model = seeded_stack(4)
    step = _step(model, max_grad_norm=1.0, on_nonfinite="skip")
    for number in range(3):
        step(stack_batch(10 * number + rank, 2) * (float("inf") if number == 1 and rank == 1 else 1.0))
    step.flush()
    return [step.progress.skipped, step.progress.nonfinite, step.progress.count]
