"""What ranks agree on before the first step, shards and room on the host: functions that processes run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import megatrain
from megatrain.errors import ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.planning.across_devices import choose
from megatrain.planning.what_if.devices_host import DevicesHost
from megatrain.ranks import host
from megatrain.ranks.weight_shards import WeightShards
from megatrain.training.attempts import taking
from tests.ranks.failing import refused
from tests.ranks.sides import OURS, Case, begin, state_of, take
from tests.ranks.there import train_there
from tests.training.parity import MODES


def choosing(rank: int, case: Case, links: Mapping[int, float], buses: Mapping[int, float]) -> Any:
    """Trains with links and buses that give so many bytes a second, by rank; says what was chosen."""
    chosen: list[Any] = []

    def noted(*arguments: Any) -> Any:
        chosen.append(choose(*arguments))
        return chosen[-1]

    bus = buses[rank]
    machine = Hardware(bus, bus, 1e12, host_bytes_per_s=1e12)
    with (
        patch.object(WeightShards, "measured_rate", lambda *_: links[rank]),
        patch.object(taking, "choose", noted),
    ):
        found = train_there(rank, replace(case, compile={**case.compile, "hardware": machine}))
    return {"found": found, "texts": [str(each) for each in chosen], "shards": [each.shards for each in chosen]}


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
        "shards": again.schedule.kind.shards,
    }


def failing_to_choose(rank: int, case: Case) -> Any:
    """Rank 1 finds no schedule in the first step; the errors, and what training finds after it."""
    torch.manual_seed(5)
    compiled, optimizer, step = begin(case, dist.group.WORLD)
    torch.manual_seed(6 + rank)

    def failing(*arguments: Any) -> Any:
        raise ScheduleError("no room here")

    with patch.object(taking, "choose", failing if rank == 1 else choose):
        error = refused(lambda: take(case, rank, step, [0]))
    taken = take(case, rank, step, range(len(case.deal)))
    found = {**taken, **state_of(compiled, optimizer, step)}
    if rank:
        found.pop("generator")
    return {"error": error, "found": found}


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
