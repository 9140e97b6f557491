"""AcrossDevices: how the work of a step is divided among the devices of a host, in whichever way it is faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.errors import MegatrainError
from megatrain.hardware.hardware import Hardware
from megatrain.options import REPLICATE, ROUND, SHARD
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.timing.bands import format_s
from megatrain.scheduler.timing.simulate_devices import simulate_devices
from megatrain.sizes import format_bytes

Agree = Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]
"""Tells all ranks something, and returns what all tell, by rank."""
Tables = Callable[[], Sequence[Schedule]]
"""Plans the step of each device of a host."""
_WITH = {REPLICATE: "whole weights", SHARD: "shards", ROUND: "dealt blocks"}


@dataclass(frozen=True, slots=True)
class PredictedWay:
    """One way to divide the work.

    Args:
        name: As the option of `compile`.
        step_s: Seconds of a step, of the rank for which they are most; None where it isn't possible.
        obstacle: Why it isn't; empty if it is.
    """

    name: str
    step_s: float | None
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class AcrossDevices:
    """What all ranks have chosen, with their predictions; prints itself.

    Args:
        ways: Whole weights, which are possible, shards, and dealt blocks.
        link_bytes_per_s: What a device gets from the others of its host in a second, as measured; the least of all.
            None if nothing moves memory from one to another.
    """

    ways: tuple[PredictedWay, ...]
    link_bytes_per_s: float | None

    @property
    def way(self) -> str:
        """The one with the shortest step, the first of equals."""
        times = [(each.step_s, number) for number, each in enumerate(self.ways) if each.step_s is not None]
        return self.ways[min(times)[1]].name

    def __str__(self) -> str:
        times = ", ".join(f"{format_s(w.step_s)} with {_WITH[w.name]}" for w in self.ways if w.step_s is not None)
        lacks = "".join(f"; no {_WITH[way.name]}, since {way.obstacle}" for way in self.ways if way.obstacle)
        link = "nothing moves memory from one of these devices to another"
        if self.link_bytes_per_s is not None:
            rate = format_bytes(int(self.link_bytes_per_s))
            link = f"a device gets {rate}/s from the others of its host, measured"
        return f"{self.way}: a step is predicted to take {times}{lacks}; {link}"


def choose(
    machine: Hardware, ways: Mapping[str, Tables | str], agree: Agree, link_bytes_per_s: float | None
) -> AcrossDevices:
    """Predicts a step like this rank's on each device of its host, in each way; all ranks take the fastest.

    All ranks call it at the same time. Each has predictions of its own, as its micro-batches may be others: the longest
    step of each way counts, and one rank's obstacle keeps all from a way.

    Args:
        machine: A device of this rank's host, and the host.
        ways: By name, whole weights first: what plans the step, or why it is impossible, in words.
        agree: See `Agree`.
        link_bytes_per_s: See `AcrossDevices`.

    Raises:
        ScheduleError: If a step with whole weights doesn't fit.
        RanksError: If another rank fails.
    """
    told: dict[str, Any] = {}
    for name, tables in ways.items():
        try:
            told[name] = tables if isinstance(tables, str) else simulate_devices(tables(), machine).step_s
        except MegatrainError as error:
            if name == REPLICATE:
                raise
            told[name] = str(error).splitlines()[0].rstrip(".")
    words = agree(told)
    assert words is not None
    return AcrossDevices(tuple(_joined(name, [word[name] for word in words]) for name in ways), link_bytes_per_s)


def _joined(name: str, told: Sequence[float | str]) -> PredictedWay:
    obstacle = next((each for each in told if isinstance(each, str)), None)
    if obstacle is not None:
        return PredictedWay(name, None, obstacle)
    return PredictedWay(name, max(each for each in told if not isinstance(each, str)))
