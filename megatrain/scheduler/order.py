"""List scheduling: gives every op a tick, as early as its stream and what it waits for allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatrain.scheduler.place import Residency
from megatrain.scheduler.workload import Workload


@dataclass(frozen=True, slots=True)
class OpTicks:
    """The tick of each op that occurs once per block, by block."""

    forward: dict[int, int]
    backward: dict[int, int]
    park: dict[int, int]
    restore: dict[int, int]
    offload: dict[int, int]


@dataclass(frozen=True, slots=True)
class Rows:
    """A table in the making: the ticks of all ops.

    Args:
        ticks: Of every op but `W`.
        loads: Tick of the `W` of each residency.
        num_ticks: Number of rows.
    """

    ticks: OpTicks
    loads: tuple[int, ...]
    num_ticks: int


class _Placer:
    """The state of one run of `assign_ticks`: the last tick taken of each stream."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.compute: list[int] = []
        self.h2d = -1
        self.d2h = -1
        self.ticks = OpTicks({}, {}, {}, {}, {})
        self._pending: list[tuple[dict[int, int], int]] = []

    def done(self, step: int) -> int:
        """The tick of a compute step; -1 before the first."""
        return self.compute[step] if step >= 0 else -1

    def place_load(self, step: int) -> int:
        """A slot is free once the step that is `num_slots` back has ended."""
        self.h2d = max(self.h2d, self.done(step - self.num_slots)) + 1
        return self.h2d

    def place_restore(self, step: int, block: int) -> int:
        """A parked value returns at most `num_slots` steps ahead, for it takes memory meanwhile."""
        parked = self.ticks.park.get(block, -1)
        self.h2d = max(self.h2d + 1, self.done(step - self.num_slots), parked + 1)
        return self.h2d

    def place_compute(self, ready: int) -> int:
        previous = self.done(len(self.compute) - 1)
        self.compute.append(max(previous, ready) + 1)
        self.place_d2h(previous if self.num_slots == 1 else self.compute[-1] - 1)
        return self.compute[-1]

    def leave(self, ticks: dict[int, int], block: int) -> None:
        """Notes a transfer to the host that can run once the last compute step placed is done."""
        self._pending.append((ticks, block))

    def place_d2h(self, after: int) -> None:
        """Places the transfers noted, in later ticks than `after`.

        Where copies to the device keep compute waiting, ticks pass without compute. A transfer to the host
        in such a tick would release its memory before the next compute, which would have to wait for it (see
        the memory edges of the dependency graph). So it takes the tick of that compute, and they overlap;
        one slot alone means the least memory instead.
        """
        for ticks, block in self._pending:
            ticks[block] = self.d2h = max(self.d2h, after) + 1
        self._pending.clear()


def assign_ticks(
    workload: Workload,
    steps: Sequence[tuple[str, int]],
    stays: Sequence[Residency],
    parked: Mapping[int, Sequence[int]],
    *,
    num_slots: int,
) -> Rows:
    """Places all ops; the order of each stream is fixed, so one pass in the order of compute steps does.

    Transfers to the device queue by need: per compute step its `A`, then its `W`. Transfers to the host queue
    by the compute step after which they can run, equal ones by block.
    """
    placer = _Placer(num_slots)
    ticks = placer.ticks
    loads: list[int] = []
    by_need = {stay.needed: stay for stay in stays}
    parks = _parks_by_producer(workload, parked)
    for step, (what, block) in enumerate(steps):
        ready = -1
        if what == "B" and block in parked:
            ready = ticks.restore[block] = placer.place_restore(step, block)
        if step in by_need:
            ready = placer.place_load(step)
            loads.append(ready)
        tick = placer.place_compute(ready)
        if what == "F":
            ticks.forward[block] = tick
            for park in parks.get(block, ()):
                placer.leave(ticks.park, park)
        else:
            ticks.backward[block] = tick
            if workload.blocks[block].gradient_bytes > 0:
                placer.leave(ticks.offload, block)
    placer.place_d2h(placer.done(len(steps) - 1))
    num_ticks = max([placer.h2d, placer.d2h, *placer.compute[-1:]]) + 1
    return Rows(ticks, tuple(loads), num_ticks)


def _parks_by_producer(workload: Workload, parked: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """The blocks whose `A` can run after each forward: all their parked values exist then."""
    found: dict[int, list[int]] = {}
    for block, values in sorted(parked.items()):
        producers = [workload.values[v].producer for v in values]
        found.setdefault(max(p for p in producers if p is not None), []).append(block)
    return found
