"""What ranks agree on before the first step, shards and room on the host: functions that processes run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

import megatrain
from megatrain.errors import ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.planning.what_if.devices_host import DevicesHost
from megatrain.ranks import host
from megatrain.ranks.weight_shards import WeightShards
from megatrain.training.attempts import taking
from megatrain.training.attempts.finding_way import find_way
from tests.comparing import snapshot
from tests.ranks.failing import refused
from tests.ranks.sides import OURS, Case, Scored, begin, state_of, take
from tests.ranks.there import train_there
from tests.training.parity import MODES, stack_batch


def choosing(
    rank: int,
    case: Case,
    links: Mapping[int, float | None],
    buses: Mapping[int, float],
    host_bytes_per_s: float = 1e12,
) -> Any:
    """Trains with links, buses and memory of the host that give so many bytes a second; says what was chosen."""
    chosen: list[Any] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        chosen.append(find_way(*arguments, **options))
        return chosen[-1]

    bus = buses[rank]
    machine = Hardware(bus, bus, 1e12, host_bytes_per_s=host_bytes_per_s)
    with (
        patch.object(WeightShards, "measured_rate", lambda *_: links[rank]),
        patch.object(taking, "find_way", noted),
    ):
        found = train_there(rank, replace(case, compile={**case.compile, "hardware": machine}))
    return {"found": found, "texts": [str(each) for each in chosen], "ways": [each.way for each in chosen]}


def measuring(rank: int, case: Case) -> Any:
    """The links as they are, and what a compiled model says of them; the kinds of two steps' ops over one model."""
    host.NAME = None if case.hosts is None else case.hosts[rank]
    try:
        compiled, optimizer, step = begin(case, dist.group.WORLD)
    finally:
        host.NAME = None
    before = str(compiled.megatrain)
    take(case, rank, step, [0])
    again = megatrain.TrainStep(compiled, optimizer, loss=OURS[case.task].loss, **MODES[case.mode])
    take(case, rank, again, [1])
    return {
        "rate": compiled.megatrain.ranks.link_bytes_per_s,
        "before": before,
        "after": str(compiled.megatrain),
        "kind": again.schedule.kind,
    }


def failing_to_choose(rank: int, case: Case) -> Any:
    """Rank 1 finds no schedule in the first step; the errors, and what training finds after it."""
    torch.manual_seed(5)
    compiled, optimizer, step = begin(case, dist.group.WORLD)
    torch.manual_seed(6 + rank)

    def failing(*_: Any, **__: Any) -> Any:
        raise ScheduleError("no room here")

    with patch.object(taking, "find_way", failing if rank == 1 else find_way):
        error = refused(lambda: take(case, rank, step, [0]))
    taken = take(case, rank, step, range(len(case.deal)))
    found = {**taken, **state_of(compiled, optimizer, step)}
    if rank:
        found.pop("generator")
    return {"error": error, "found": found}


def interrupted_choice(rank: int, case: Case) -> list[str]:
    """Ctrl-C ends the first step of rank 1 while ranks choose; what each says then, and of a further step."""
    _, _, step = begin(case, dist.group.WORLD)

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    def tried() -> str:
        try:
            return refused(lambda: take(case, rank, step, [0]))
        except KeyboardInterrupt:
            return "KeyboardInterrupt"

    with patch.object(taking, "find_way", interrupted if rank == 1 else find_way):
        return [tried(), tried()]


def lacking_room(rank: int, case: Case) -> Any:
    """The host of rank 0 has a byte too little in the first step; the errors, and what training finds after it."""
    torch.manual_seed(5)
    compiled, optimizer, step = begin(case, dist.group.WORLD)
    torch.manual_seed(6 + rank)
    needed: list[int] = []
    whole = DevicesHost.check

    def check(found: DevicesHost, host_memory: int) -> None:
        needed.append(found.total_bytes)
        whole(found, found.total_bytes - 1 if is_short else host_memory)

    is_short = 0 in compiled.megatrain.ranks.host.ranks
    with patch.object(DevicesHost, "check", check):
        error = refused(lambda: take(case, rank, step, [0]))
    is_untouched = compiled.megatrain.engine.store is None
    taken = take(case, rank, step, range(len(case.deal)))
    found = {**taken, **state_of(compiled, optimizer, step)}
    if rank:
        found.pop("generator")
    return {"error": error, "found": found, "needed": needed, "is_untouched": is_untouched}


def sharing_a_choice(rank: int | None, hosts: str) -> Any:
    """Trains with three steps over one model: two were made before one of them chose, one after it.

    Args:
        rank: One of as many as there are names; None is one process.
        hosts: The name of each rank's host.
    """
    compiled, optimizer = _choosing_model(rank, hosts)
    options: dict[str, Any] = {"max_grad_norm": 0.01}
    first, second = (megatrain.TrainStep(compiled, optimizer, **options) for _ in range(2))
    third: megatrain.TrainStep | None = None
    torch.manual_seed(6 + (rank or 0))
    losses: list[torch.Tensor] = []
    devices: list[int] = []
    for number in range(4):
        step = (first, second, third, first)[number]
        assert step is not None
        batches = [stack_batch(4 * number + place, 2) for place in range(len(hosts))]
        given = batches if rank is None else [batches[rank]]
        if number > 1:
            step.prepare(given)
        losses.append(step(given))
        devices.append(step.schedule.kind.devices)
        third = third or megatrain.TrainStep(compiled, optimizer, **options)
    other = megatrain.TrainStep(compiled, optimizer, loss=lambda result, batch: result * 2)
    refusal = "" if rank is None else refused(lambda: other(stack_batch(rank, 2)))
    assert refusal.startswith("ExecuteError: this step has a loss=, and another step ") == (rank is not None), refusal
    found = {"losses": losses, **snapshot(compiled.megatrain.model, optimizer)}
    found.pop("generator")
    return {**found, **({} if rank is None else {"devices": devices, "text": str(compiled.megatrain)})}


def kept_from_dealing(rank: int, what: str) -> Any:
    """What is said of a first step that has something that is impossible with dealt blocks."""
    compiled, optimizer = _choosing_model(rank, None)
    if what == "hook":
        next(compiled.parameters()).register_hook(lambda gradient: None)
    if what == "step hook":
        optimizer.register_step_post_hook(lambda *_: None)
    chosen: list[Any] = []

    class Pair(NamedTuple):  # of this function, and not of its module
        first: int
        second: int

    def noted(*arguments: Any, **options: Any) -> Any:
        chosen.append(find_way(*arguments, **options))
        return chosen[-1]

    step = megatrain.TrainStep(compiled, optimizer, weight=lambda batch: 1)
    batch: Any = {"x": stack_batch(rank, 2), "words": Pair(1, 2) if what == "class" else None}
    with patch.object(taking, "find_way", noted):
        step(batch)
    return str(chosen[0])


class _Wordy(Scored):
    def forward(self, x: torch.Tensor, words: Any = None) -> torch.Tensor:
        return super().forward(x)


def _choosing_model(rank: int | None, hosts: str | None) -> tuple[Any, torch.optim.Optimizer]:
    """A model for which dealt blocks are the fastest, and its optimizer."""
    torch.manual_seed(1234)
    model, slow = _Wordy(), Hardware(1e5, 1e5, 1e12, host_bytes_per_s=1e12)
    group: Any = None if rank is None else dist.group.WORLD
    way = "replicate" if rank is None else "auto"
    host.NAME = None if hosts is None or rank is None else hosts[rank]
    try:
        with patch.object(WeightShards, "measured_rate", lambda *_: None):
            compiled = megatrain.compile(
                model, device="cpu", transfer="copy", hardware=slow, process_group=group, across_devices=way
            )
    finally:
        host.NAME = None
    return compiled, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
