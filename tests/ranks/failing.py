"""What ranks do that differ, fail or die: functions that processes run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import megatrain
from megatrain.optim.block_update import MasterStep
from megatrain.ranks import shared_memory
from megatrain.runtime.streams.stream_set import Chaos
from tests.models import Stack
from tests.ranks.sides import Case, begin
from tests.training.parity import seeded_stack, square, stack_batch

CASE = Case("stack", "overlap", [(1, 1, 1)] * 4)


def batch(step: int, rank: int) -> Any:
    return CASE.batches(step)[rank]


def refused(work: Callable[[], object]) -> str:
    """What was raised, or nothing."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def differing(rank: int, what: str) -> str:
    """Rank 1 has something else than the others."""
    is_odd = rank == 1
    model: Any = seeded_stack(4) if what != "width" or not is_odd else Stack(4, 6)
    if what == "value" and is_odd:
        model.head.bias.data[0] += 1
    compiled = megatrain.compile(model, device="cpu", process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if what != "lr" or not is_odd else 0.2)
    clip = 1.0 if what == "clip" and is_odd else None
    step = megatrain.TrainStep(compiled, optimizer, loss=square, max_grad_norm=clip)
    text = refused(lambda: step(stack_batch(rank, 2)))
    # Nothing has happened, so that ranks which are made alike can go on.
    assert step.progress.count == 0
    if what == "lr":
        optimizer.param_groups[0]["lr"] = 0.1
        step(stack_batch(rank, 2))
        assert step.progress.count == 1
    return text


def failing_early(rank: int) -> tuple[list[str], int]:
    """Rank 1 gives a bad batch once; then all go on."""
    step = begin(CASE, dist.group.WORLD)[2]
    texts = []
    for number in range(3):
        given = [] if number == 1 and rank == 1 else batch(number, rank)
        texts.append(refused(lambda given=given: step(given)))
    return texts, step.progress.count


def failing_late(rank: int) -> list[str]:
    """The second loss of rank 1 raises."""
    step = begin(CASE, dist.group.WORLD)[2]
    own = step._run._rules.loss

    def loss(result: Any, given: Any) -> torch.Tensor:
        if rank == 1 and step.progress.count == 1:
            raise ValueError("no loss today")
        assert own is not None
        return own(result, given)

    step._run._rules = replace(step._run._rules, loss=loss)
    return [refused(lambda number=number: step(batch(number, rank))) for number in range(3)]


def dying(rank: int, when: str) -> str:
    """Rank 1 is killed at some place."""
    case = replace(CASE, mode="spread" if when == "update" else "overlap")
    step = begin(case, dist.group.WORLD)[2]
    step(case.batches(0)[rank])
    if rank == 1:
        if when == "loss":
            kill: Any = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            step._run._rules = replace(step._run._rules, loss=kill)
        elif when == "update":
            killed: Any = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            MasterStep.__call__ = MasterStep.run = killed
        elif when == "between":
            os.kill(os.getpid(), signal.SIGKILL)
    return refused(lambda: step(case.batches(1)[rank]))


def impossible(rank: int) -> list[str]:
    group = dist.group.WORLD
    compiled, _, step = begin(CASE, group)
    given = batch(0, rank)[0]
    normed = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    writes = megatrain.TrainStep(
        megatrain.compile(normed, device="cpu", process_group=group),
        torch.optim.SGD(normed.parameters(), lr=0.1),
        loss=square,
    )
    _, hooked, watched = begin(CASE, group)
    hooked.register_step_post_hook(lambda *_: None)
    inductor = {"kernels": "inductor", "process_group": group}

    def on_two_hosts() -> None:
        shared_memory.NAME = "ab"[rank == 2]
        try:
            megatrain.compile(seeded_stack(1), device="cpu", process_group=group)
        finally:
            shared_memory.NAME = None

    return [
        refused(lambda: compiled(given).sum().backward()),
        refused(lambda: step.measure([given])),
        refused(lambda: writes(stack_batch(rank, 2))),
        refused(lambda: watched([given])),
        refused(lambda: megatrain.compile(seeded_stack(1), device="cpu", **inductor)),
        refused(on_two_hosts),
    ]


def saving_alone(rank: int, folder: str) -> tuple[list[str], bool]:
    """Rank 0 saves where the others take a step; then all do the same again."""
    _, _, step = begin(CASE, dist.group.WORLD)
    step(batch(0, rank))
    texts = [refused(lambda: step.save(folder) if rank == 0 else step(batch(1, rank)))]
    existed = os.path.exists(folder)
    texts += [refused(lambda: step(batch(1, rank))), refused(lambda: step.save(folder))]
    return texts, existed


def failing_op(rank: int, op: str) -> tuple[str, str]:
    """An op of rank 1 fails; then there is another step."""
    chaos = Chaos(max_delay_s=0, fail=op) if rank == 1 else None
    case = replace(CASE, compile={"chaos": chaos, "transfer": "copy", "block_bytes": "100B"})
    _, _, step = begin(case, dist.group.WORLD)
    steps = [case.batches(number)[rank] for number in range(2)]
    return refused(lambda: step(steps[0])), refused(lambda: step(steps[1]))
