"""AcrossDevices: how weights come to the devices of a host, whole or in shards, whichever a step is faster with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatrain.errors import ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.passes.interpret import reads_values
from megatrain.passes.program import Program
from megatrain.ranks.ranks import Ranks
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.timing.bands import format_s
from megatrain.scheduler.timing.simulate_devices import simulate_devices
from megatrain.sizes import format_bytes

Agree = Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]
"""Tells all ranks something, and returns what all tell, by rank."""
Plan = Callable[[StepKind], Schedule]
"""Plans this rank's step as one of a kind."""


@dataclass(frozen=True, slots=True)
class AcrossDevices:
    """What all ranks have chosen, with their predictions; prints itself.

    Args:
        shards: How many each host's weights come in; 1: they come whole.
        link_bytes_per_s: What a device gets from the others of its host in a second, as measured; the least of all.
        replicate_s: Seconds of a step with whole weights, of the rank for which they are most.
        shard_s: The same with shards; None where they aren't possible.
        obstacle: Why they aren't; empty if they are.
    """

    shards: int
    link_bytes_per_s: float
    replicate_s: float
    shard_s: float | None
    obstacle: str = ""

    def __str__(self) -> str:
        link = f"a device gets {format_bytes(int(self.link_bytes_per_s))}/s from the others of its host, measured"
        if self.shard_s is None:
            return f"replicate, since {self.obstacle}; {link}"
        way = "shard" if self.shards > 1 else "replicate"
        return (
            f"{way}: a step is predicted to take {format_s(self.replicate_s)} with whole weights, "
            f"{format_s(self.shard_s)} with shards; {link}"
        )


def choose(
    ranks: Ranks, machine: Hardware, kind: StepKind, programs: Sequence[Program], plan: Plan, agree: Agree
) -> AcrossDevices:
    """Predicts a step like this rank's on each device of its host, in both ways; all ranks take the one that is faster.

    All ranks call it at the same time. Each has predictions of its own, as its micro-batches may be others: the longest
    step of either way counts.

    Args:
        ranks: Whose links were measured.
        machine: A device of this rank's host, and the host.
        kind: Of this rank's step, with whole weights.
        programs: What it runs.
        plan: See `Plan`.
        agree: See `Agree`.

    Raises:
        ScheduleError: If a step with whole weights doesn't fit.
        RanksError: If another rank fails.
    """
    host, link = ranks.host, ranks.link_bytes_per_s
    assert host is not None
    assert link is not None
    machine = replace(machine, further_rates={**machine.further_rates, Stream.GATHER: link})

    def seconds(shards: int) -> float:
        places = ["first", *["middle"] * (host.size - 2), "last"]
        made = {place: plan(replace(kind, ranks=place, shards=shards)) for place in dict.fromkeys(places)}
        return simulate_devices([made[place] for place in places], machine).step_s

    whole_s, shard_s, obstacle = seconds(1), None, _obstacle(programs)
    if not obstacle:
        try:
            shard_s = seconds(host.size)
        except ScheduleError:
            obstacle = "no schedule with shards fits the memory"
    words = agree({"replicate": whole_s, "shard": shard_s, "obstacle": obstacle})
    assert words is not None
    replicate_s = max(word["replicate"] for word in words)
    obstacles = [word["obstacle"] for word in words if word["obstacle"]]
    if obstacles:
        return AcrossDevices(1, link, replicate_s, None, obstacles[0])
    shard_s = max(word["shard"] for word in words)
    return AcrossDevices(host.size if shard_s < replicate_s else 1, link, replicate_s, shard_s)


def _obstacle(programs: Sequence[Program]) -> str:
    """Why weights can't come in shards: a rank that runs its forward again needs the others."""
    for program in programs:
        if any(reads_values(template.graph) for template in program.templates.values()):
            return "Python code reads values of the forward, which may have to run again"
    return ""
