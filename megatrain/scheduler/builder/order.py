"""List scheduling: gives every op a tick, as early as its stream and its dependencies allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from megatrain.scheduler.builder.stays import Stage, Stay
from megatrain.scheduler.items import Sections
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload
from megatrain.sizes import gathered_bytes

# A block and a micro-batch.
Run = tuple[int, int]
# A block and one of its sections; None is the whole block.
Part = tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class OpTicks:
    """The tick of each op but `W`, by block and micro-batch; `G`, `R` and `P` count as ones of micro-batch 0."""

    forward: dict[Run, int] = field(default_factory=dict[Run, int])
    backward: dict[Run, int] = field(default_factory=dict[Run, int])
    park: dict[Run, int] = field(default_factory=dict[Run, int])
    restore: dict[Run, int] = field(default_factory=dict[Run, int])
    offload: dict[Run, int] = field(default_factory=dict[Run, int])
    receive: dict[Run, int] = field(default_factory=dict[Run, int])
    send: dict[Run, int] = field(default_factory=dict[Run, int])


@dataclass(frozen=True, slots=True)
class Rows:
    """A table in the making: the ticks of all ops but those of the host.

    Args:
        ticks: Of every op but `W`.
        loads: Ticks of the `W` of each stay: one, or one for each section.
        gathers: Tick of the `C` of each stay; None where all its weights come with the `W`.
        num_ticks: Number of rows.
    """

    ticks: OpTicks
    loads: tuple[tuple[int, ...], ...]
    gathers: tuple[int | None, ...]
    num_ticks: int


class Written(NamedTuple):
    """When the host has written a block's weights.

    Attributes:
        tick: The tick of the last update.
        host_bytes: What the host reads and writes until then.
    """

    tick: int
    host_bytes: int


# How much faster the memory of a host is than the link to its device, at most: weights that are waited for go first.
HOST_BY_LINK = 4


class _Arrival(NamedTuple):
    """A transfer to the device: the `W` of a stay, or else an `A`.

    They queue by the compute step that must be done before (negative ones lie before the first), then by the step
    that needs them.
    """

    after: int
    needed: int
    is_load: bool
    block: int
    micro_batch: int
    section: int | None
    stay: int | None


class _Placer:
    """The state of one run of `assign_ticks`: the last tick taken of each stream."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.compute: list[int] = []
        self.h2d = -1
        self.d2h = -1
        self.gather = -1
        self.ticks = OpTicks()
        self._pending: list[tuple[dict[Run, int], Run, int]] = []

    def done(self, step: int) -> int:
        """The tick of a compute step; -1 before the first."""
        return self.compute[step] if step >= 0 else -1

    def place_arrival(self, arrival: _Arrival, written: Mapping[Part, Written]) -> int:
        """A `W` needs a free slot, and weights that are written; an `A` what was parked before.

        A parked value returns at most `num_slots` steps ahead, for it takes memory meanwhile.
        """
        free = self.done(arrival.after)
        if arrival.is_load:
            part = arrival.block, arrival.section
            writing = written[part].tick if part in written else -1
            self.h2d = max(self.h2d, free, writing) + 1
        else:
            run = (arrival.block, arrival.micro_batch)
            if any(ticks is self.ticks.park and waiting == run for ticks, waiting, _ in self._pending):
                self.place_d2h(self.done(len(self.compute) - 1))  # results return soon after they left
            self.h2d = max(self.h2d + 1, free, self.ticks.park.get(run, -1) + 1)
            self.ticks.restore[run] = self.h2d
        return self.h2d

    def place_compute(self, ready: int) -> int:
        previous = self.compute[-1] if self.compute else -1
        tick = max(previous, ready) + 1
        self.compute.append(tick)
        if self._pending:
            self.place_d2h(previous if self.num_slots == 1 else tick - 1, step=len(self.compute) - 1)
        return tick

    def leave(self, ticks: dict[Run, int], run: Run, *, beside: int = 0) -> None:
        """Notes a transfer to the host that can run once the last compute step placed is done.

        Args:
            ticks: Where its tick goes.
            run: Its block and micro-batch.
            beside: The transfer takes the tick of this compute step, if the step comes later.
        """
        self._pending.append((ticks, run, beside))

    def place_d2h(self, after: int, *, step: int | None = None) -> None:
        """Places the transfers noted, in later ticks than `after`, up to the first that takes a later step's tick.

        Where copies to the device keep compute waiting, ticks pass without compute. A transfer to the host
        in such a tick would release its memory before the next compute, which would have to wait for it (see
        the memory edges of the dependency graph). So it takes the tick of that compute, and they overlap;
        one slot alone means the least memory instead.
        """
        while self._pending and (step is None or self._pending[0][2] <= step):
            ticks, run, _ = self._pending.pop(0)
            ticks[run] = self.d2h = max(self.d2h, after) + 1


def assign_ticks(
    workload: Workload,
    kind: StepKind,
    stages: Sequence[Stage],
    stays: Sequence[Stay],
    parked: Mapping[int, Sequence[int]],
    *,
    num_slots: int,
    has_late_offloads: bool,
    written: Mapping[Part, Written],
    sections: Sections | None = None,
) -> Rows:
    """Places all ops; the order of each stream is fixed, so one pass in the order of compute steps does.

    Transfers to the device queue by when they can run, then by need; transfers to the host by the compute step
    after which they can run, equal ones by block.

    Args:
        workload: What runs.
        kind: The kind of the step.
        stages: In the order of compute.
        stays: In the order of need.
        parked: As in `Effects`.
        num_slots: As in `Choices`.
        has_late_offloads: See there.
        written: When the host has written a block's weights, where it does.
        sections: The block whose first `W` is divided.
    """
    placer = _Placer(num_slots)
    steps = [work for stage in stages for work in stage]
    queue = _arrivals(stages, stays, parked, num_slots, sections)
    if kind.shards == 1:  # shards come in one order on all devices
        queue = _first_at_once(queue, workload, written, sections)
    # How much of the queue a step needs: its own transfers and everything queued before them.
    needs = {arrival.needed: index + 1 for index, arrival in enumerate(queue)}
    parks = _parks_by_producer(workload, parked)
    last_work = {work.block: work for work in steps if work.what == "B"}
    stage_of = [number for number, stage in enumerate(stages) for _ in stage]
    ends = [end - 1 for end in accumulate(map(len, stages))]
    loads: list[list[int]] = [[] for _ in stays]
    gathers: list[int | None] = [None for _ in stays]
    ready = [-1] * len(steps)
    at = 0
    for step, work in enumerate(steps):
        for arrival in queue[at : needs.get(step, at)]:
            tick = placer.place_arrival(arrival, written)
            ready[arrival.needed] = tick
            if arrival.stay is not None:
                loads[arrival.stay].append(tick)
                if gathered_bytes(workload.blocks[arrival.block].state_bytes, kind.shards):
                    gathers[arrival.stay] = placer.gather = ready[arrival.needed] = max(placer.gather, tick) + 1
        at = max(at, needs.get(step, at))
        tick = placer.place_compute(ready[step])
        run = (work.block, work.micro_batch)
        if work.what == "F":
            placer.ticks.forward[run] = tick
            for park in parks.get(work.block, ()):
                placer.leave(placer.ticks.park, (park, work.micro_batch))
        else:
            placer.ticks.backward[run] = tick
            if workload.blocks[work.block].gradient_bytes > 0 and last_work[work.block] == work:
                beside = ends[min(stage_of[step] + 1, len(ends) - 1)] if has_late_offloads else step
                placer.leave(placer.ticks.offload, (work.block, 0), beside=beside)
    placer.place_d2h(placer.done(len(steps) - 1))
    num_ticks = max([placer.h2d, placer.d2h, *placer.compute[-1:]]) + 1
    return Rows(placer.ticks, tuple(map(tuple, loads)), tuple(gathers), num_ticks)


def _arrivals(
    stages: Sequence[Stage],
    stays: Sequence[Stay],
    parked: Mapping[int, Sequence[int]],
    num_slots: int,
    sections: Sections | None,
) -> list[_Arrival]:
    """All transfers to the device, in the order of their queue."""
    divided = next((i for i, stay in enumerate(stays) if sections is not None and stay.block == sections.block), None)
    starts = [0, *accumulate(len(stage) for stage in stages)]
    found: list[_Arrival] = []
    free = -len(stages)
    for index, stay in enumerate(stays):
        # What is needed sooner comes sooner, even if its bytes are free later.
        free = max(free, stay.needed - stay.ahead - 1)
        after = starts[free + 1] - 1 if free >= 0 else free
        for _, section in parts_of(stay.block, sections if index == divided else None):
            found.append(_Arrival(after, starts[stay.needed], True, stay.block, 0, section, index))
    for start, stage in zip(starts, stages, strict=False):
        for step, work in enumerate(stage, start):
            if work.what == "B" and work.block in parked:
                found.append(_Arrival(step - num_slots, step, False, work.block, work.micro_batch, None, None))
    return sorted(found)


def _first_at_once(
    queue: Sequence[_Arrival], workload: Workload, written: Mapping[Part, Written], sections: Sections | None
) -> Sequence[_Arrival]:
    """The queue with the transfers that no compute step precedes in the order in which they can run.

    What the host writes later lets others go first. No rate is known: bytes are weighed as most machines move them.
    """
    head = [arrival for arrival in queue if arrival.after < 0 and arrival.is_load]
    rest = [arrival for arrival in queue if arrival not in head]
    begins = {arrival: 0.0 for arrival in head}  # in bytes of the link
    parts = {arrival: (arrival.block, arrival.section) for arrival in head}
    begins |= {a: written[part].host_bytes / HOST_BY_LINK for a, part in parts.items() if part in written}
    begun: list[_Arrival] = []
    moved = 0.0
    for _ in head:
        left = (arrival for arrival in head if arrival not in begun)
        begun.append(min(left, key=lambda arrival: (max(moved, begins[arrival]), arrival.needed)))
        nbytes = workload.blocks[begun[-1].block].state_bytes
        if begun[-1].section is not None and sections is not None:
            nbytes //= sections.num_sections
        moved = max(moved, begins[begun[-1]]) + nbytes
    return [*begun, *rest]


def parts_of(block: int, sections: Sections | None) -> list[Part]:
    """The sections of a block, or the block as a whole if it isn't divided."""
    if sections is None or sections.block != block:
        return [(block, None)]
    return [(block, section) for section in range(sections.num_sections)]


def _parks_by_producer(workload: Workload, parked: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """The blocks whose `A` can run after each forward: all their parked values exist then."""
    found: dict[int, list[int]] = {}
    for block, values in sorted(parked.items()):
        producers = [workload.values[v].producer for v in values]
        found.setdefault(max(p for p in producers if p is not None), []).append(block)
    return found
