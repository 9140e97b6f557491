"""List scheduling: gives every op a tick, as early as its stream and its dependencies allow, and the host's last."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

import networkx as nx

from megatrain.scheduler.builder.stays import Stage, Stay, Work
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload


class Arrival(NamedTuple):
    """A transfer to the device: the `W` of a stay, or else an `A`.

    They queue by the compute step that must be done before (negative ones lie before the first), then by the step
    that needs them.
    """

    after: int
    needed: int
    is_load: bool
    block: int
    micro_batch: int
    stay: int | None


def arrivals(
    stages: Sequence[Stage], stays: Sequence[Stay], parked: Mapping[int, Sequence[int]], num_slots: int
) -> list[Arrival]:
    """All transfers to the device, in the order of their queue."""
    starts = [0, *accumulate(len(stage) for stage in stages)]
    found: list[Arrival] = []
    free = -len(stages)
    for index, stay in enumerate(stays):
        # What is needed sooner comes sooner, even if its bytes are free later.
        free = max(free, stay.needed - stay.ahead - 1)
        after = starts[free + 1] - 1 if free >= 0 else free
        found.append(Arrival(after, starts[stay.needed], True, stay.block, 0, index))
    for start, stage in zip(starts, stages, strict=False):
        for step, work in enumerate(stage, start):
            if work.is_backward and work.block in parked:
                found.append(Arrival(step - num_slots, step, False, work.block, work.micro_batch, None))
    return sorted(found)


@dataclass(frozen=True, slots=True)
class OpTicks:
    """The tick of each op but `W`, by block: of `F`, `B` and `A` those of all micro-batches; `S`, `U` of the device."""

    forward: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    backward: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    park: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    restore: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    offload: dict[int, int] = field(default_factory=dict[int, int])
    squares: dict[int, int] = field(default_factory=dict[int, int])
    update: dict[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True, slots=True)
class Rows:
    """A table in the making: the ticks of all ops but those of the host.

    Args:
        loads: The tick of the `W` of each stay.
    """

    ticks: OpTicks
    loads: tuple[int, ...]


class _Leaving(NamedTuple):
    """A transfer to the host: an `A` of a micro-batch, or a `G`, or the norms of gradients that stay, which have none.

    It takes the tick of the compute step `beside`, if that step comes later.
    """

    block: int
    micro_batch: int | None
    beside: int


class _Placer:
    """One run of `assign_ticks`: the last tick taken of each stream."""

    def __init__(
        self,
        kind: StepKind,
        num_slots: int,
        written: Mapping[int, int],
        device_updates: Collection[int],
        queue: Sequence[Arrival],
        num_stays: int,
    ) -> None:
        self._num_slots, self._written, self._device_updates = num_slots, written, device_updates
        self._clip, self._has_norm = kind.clip, kind.clip or kind.reports_norm
        self._queue = queue
        # How much of the queue a step needs: its own transfers and everything queued before them.
        self._needs = {arrival.needed: index + 1 for index, arrival in enumerate(queue)}
        self._at = 0
        self._ready: dict[int, int] = {}  # of steps that need transfers: the tick of the last of these
        self._leaving: list[_Leaving] = []
        self._h2d = self._d2h = -1
        self._compute: list[int] = []
        self._latest = -1  # of compute, updates included
        self._ticks = OpTicks()
        self._loads = [0] * num_stays

    def place(self, stage: Stage, parks: Sequence[int], offloads_after: Work | None, beside: int | None) -> None:
        """Places the compute steps of a stage, each after what it needs, and notes what leaves after them.

        Args:
            stage: The next one.
            parks: The blocks whose `A` follow its forwards.
            offloads_after: The backward that its block's gradients follow; None if there are none.
            beside: Of the `G`, or the norms, as in `_Leaving`; None is its own step.
        """
        compute, needs, ready, leaving = self._compute, self._needs, self._ready, self._leaving
        block = stage[0].block
        forward = self._ticks.forward.setdefault(block, []) if not stage[0].is_backward else []
        backward = self._ticks.backward.setdefault(block, []) if stage[-1].is_backward else []
        tick = self._latest
        for step, work in enumerate(stage, len(compute)):
            if step in needs:
                self._place_transfers(needs[step])
            previous, after = tick, max(tick, ready.get(step, -1))
            tick = after + 1
            compute.append(tick)
            if leaving:
                self._place_d2h(previous if self._num_slots == 1 else after, step=step)
            if not work.is_backward:
                forward.append(tick)
                if parks:
                    leaving += [_Leaving(park, work.micro_batch, 0) for park in parks]
            else:
                backward.append(tick)
                is_there = block in self._device_updates
                if work is offloads_after and is_there and not self._clip:
                    tick += 1
                    self._ticks.update[block] = tick
                if work is offloads_after and (self._has_norm or not is_there):
                    leaving.append(_Leaving(block, None, step if beside is None else beside))
        self._latest = tick

    def rows(self) -> Rows:
        """What was placed, with all that was left to leave."""
        self._place_d2h(self._latest)
        return Rows(self._ticks, tuple(self._loads))

    def _place_transfers(self, end: int) -> None:
        """Places the transfers of the queue up to one."""
        for arrival in self._queue[self._at : end]:
            if arrival.stay is None:
                self._ready[arrival.needed] = self._place_return(arrival)
                continue
            self._ready[arrival.needed] = tick = self._place_load(arrival)
            self._loads[arrival.stay] = tick
        self._at = max(self._at, end)

    def _place_load(self, arrival: Arrival) -> int:
        """A `W` needs a free slot, and weights that are written."""
        writing = self._written.get(arrival.block, -1)
        free = self._compute[arrival.after] if arrival.after >= 0 else -1
        self._h2d = max(self._h2d, free, writing) + 1
        return self._h2d

    def _place_return(self, arrival: Arrival) -> int:
        """An `A` needs what was parked before.

        A parked value returns at most `num_slots` steps ahead, for it takes memory meanwhile.
        """
        after, _, _, block, micro_batch, _ = arrival
        free = self._compute[after] if after >= 0 else -1
        parked = self._ticks.park.get(block, ())
        if micro_batch >= len(parked) and any(each[:2] == (block, micro_batch) for each in self._leaving):
            self._place_d2h(self._compute[-1])  # results return soon after they left
            parked = self._ticks.park[block]
        left = parked[micro_batch] if micro_batch < len(parked) else -1
        self._h2d = tick = max(self._h2d, free - 1, left) + 1
        self._ticks.restore.setdefault(block, []).append(tick)
        return tick

    def _place_d2h(self, after: int, *, step: int | None = None) -> None:
        """Places the transfers noted, in later ticks than `after`, up to the first that takes a later step's tick.

        Where copies to the device keep compute waiting, ticks pass without compute. A transfer to the host
        in such a tick would release its memory before the next compute, which would have to wait for it (see
        the memory edges of the dependency graph). So it takes the tick of that compute, and they overlap;
        one slot alone means the least memory instead.
        """
        count = 0
        for block, micro_batch, beside in self._leaving:
            if step is not None and beside > step:
                break
            count += 1
            self._d2h = max(self._d2h, after) + 1
            if micro_batch is None:
                of_stream = self._ticks.squares if block in self._device_updates else self._ticks.offload
                of_stream[block] = self._d2h
            else:
                self._ticks.park.setdefault(block, []).append(self._d2h)
        del self._leaving[:count]


def assign_ticks(
    workload: Workload,
    kind: StepKind,
    stages: Sequence[Stage],
    stays: Sequence[Stay],
    parked: Mapping[int, Sequence[int]],
    *,
    num_slots: int,
    has_late_offloads: bool,
    written: Mapping[int, int],
    device_updates: Collection[int] = (),
) -> Rows:
    """Places all ops but the host's and what follows a norm; as streams have a fixed order, one pass does.

    Transfers to the device queue by when they can run, then by need; transfers to the host by the compute step
    after which they can run, equal ones by block. Stages are in the order of compute, stays in the order of need.
    """
    queue = arrivals(stages, stays, parked, num_slots)
    placer = _Placer(kind, num_slots, written, device_updates, queue, len(stays))
    parks = _parks_by_producer(workload, parked)
    trained = (work for stage in stages for work in stage if work.is_backward)
    last = {work.block: work for work in trained if workload.blocks[work.block].gradient_bytes > 0}
    ends = [end - 1 for end in accumulate(map(len, stages))]
    for number, stage in enumerate(stages):
        block = stage[0].block
        beside = ends[min(number + 1, len(ends) - 1)] if has_late_offloads else None
        placer.place(stage, parks.get(block, ()), last.get(block), beside)
    return placer.rows()


def _parks_by_producer(workload: Workload, parked: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """The blocks whose `A` can run after each forward: all their parked values exist then."""
    found: dict[int, list[int]] = {}
    for block, values in sorted(parked.items()):
        producers = [workload.values[v].producer for v in values]
        found.setdefault(max(p for p in producers if p is not None), []).append(block)
    return found


@dataclass(frozen=True, slots=True)
class HostTicks:
    """The ticks of the host's ops."""

    update: Mapping[int, int]
    squares: Mapping[int, int]
    norm: int | None


# A forward is shorter than the backward, and so is the host's time for deferred updates. See decision 56.
DEFERRED_SHARE = Fraction(2, 5)


def deferred_updates(workload: Workload, kind: StepKind, device_updates: Collection[int] = ()) -> frozenset[int]:
    """The blocks whose update is deferred to the head of the next step, of those that the host updates.

    Of spread updates two fifths of the bytes are deferred, evenly among the blocks. The backward releases blocks in one
    order and the next forward needs them in the other: so each leaves the host time for some blocks of each region. The
    first block, whose gradients come last, is deferred: the end of a step doesn't wait for its update.
    """
    if kind.updates != "spread":
        every = workload.update_blocks() if kind.updates == "deferred" else ()
        return frozenset(every).difference(device_updates)
    deferred: set[int] = set()
    ahead = Fraction(0)  # bytes of deferred updates beyond their share
    for blocks in _sharing_blocks(workload):
        updates = [b for b in blocks if workload.blocks[b].update_bytes > 0 and b not in device_updates]
        nbytes = sum(workload.blocks[block].update_bytes for block in updates)
        is_deferred = ahead <= 0
        deferred.update(updates if is_deferred else ())
        ahead += nbytes * (int(is_deferred) - DEFERRED_SHARE)
    return frozenset(deferred)


def _sharing_blocks(workload: Workload) -> Sequence[Sequence[int]]:
    """All blocks, together where updates share their gradients, which wait for all of these; by the first of them."""
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(len(workload.blocks)))
    graph.add_edges_from((block, b) for block in workload.update_blocks() for b in workload.update_group(block))
    return sorted(map(sorted, nx.connected_components(graph)))


def head_updates(workload: Workload, deferred: Collection[int], loads: Iterable[int]) -> dict[int, int]:
    """Ticks of updates at the head of a step, each before the first `W` that reads the updated parameters.

    The blocks of the `W` ops are in their order.
    """
    owners: dict[int, list[int]] = {}
    for block in sorted(deferred):
        for member in workload.update_group(block):
            owners.setdefault(member, []).append(block)
    order = dict.fromkeys(owner for block in loads for owner in owners.get(block, ()))
    return {block: tick for tick, block in enumerate(order)}


def written(workload: Workload, head: Mapping[int, int]) -> dict[int, int]:
    """The tick in which the last update at the head has written a block's weights, by block."""
    return {member: tick for block, tick in head.items() for member in workload.update_group(block)}


def place_host(workload: Workload, kind: StepKind, ticks: OpTicks, head: Mapping[int, int]) -> HostTicks:
    """Gives the ops of the host their ticks: updates in the order in which their gradients leave.

    Updates of the device that wait for the norm follow it, in the order of blocks.

    Updates that overlap take the tick of the next `G`. In an earlier one they would release their gradients before
    it, which would have to wait for them (see the memory edges of the dependency graph). Squares release nothing: they
    follow their `G` at once, so that only those of the last block are left when all gradients are there.
    """
    last = max((*ticks.offload.values(), *ticks.squares.values()), default=-1)
    free = max(head.values(), default=-1) + 1
    squares: dict[int, int] = {}
    for block, left in sorted(ticks.offload.items(), key=lambda leaving: leaving[1]) if kind.clip else ():
        squares[block] = free = max(free, left + 1)
        free += 1
    norm = max(last + 1, free) if kind.clip else None
    if norm is not None:
        # Backwards of blocks that train nothing may come after the norm.
        after = 1 + max((norm, *(tick for of_block in ticks.backward.values() for tick in of_block)))
        ticks.update.update({block: after + place for place, block in enumerate(sorted(ticks.squares))})
    if kind.updates in ("none", "deferred"):
        return HostTicks(head, squares, norm)
    at_least = last if kind.updates == "serial" else -1
    at_least = at_least if norm is None else norm
    arrivals = sorted(ticks.offload.values())
    placed = dict(head)
    for ready, block in _by_readiness(workload, ticks):
        if block in head or block in ticks.update:
            continue
        following = bisect_right(arrivals, ready) + int(kind.updates == "spread")
        overlapped = arrivals[following] if following < len(arrivals) else max(ready, *arrivals[-1:]) + 1
        placed[block] = free = max(free, overlapped, at_least + 1)
        free += 1
    return HostTicks(placed, squares, max(free, last + 1) if kind.reports_norm else norm)


def _by_readiness(workload: Workload, ticks: OpTicks) -> Sequence[tuple[int, int]]:
    """Per update, the tick in which its last gradient leaves and the last op reads its parameters, and its block."""
    last: dict[int, int] = dict(ticks.offload)
    for runs in (ticks.forward, ticks.backward):
        for block, of_block in runs.items():
            last[block] = max(last.get(block, -1), *of_block)
    return sorted(
        (max(last[member] for member in workload.update_group(block)), block) for block in workload.update_blocks()
    )
