"""Arrivals: the queue of the transfers to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from megatrain.scheduler.builder.stays import Stage, Stay
from megatrain.scheduler.workload import Workload


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
            if work.what == "B" and work.block in parked:
                found.append(Arrival(step - num_slots, step, False, work.block, work.micro_batch, None))
    return sorted(found)


def first_at_once(queue: Sequence[Arrival], workload: Workload, written: Mapping[int, Written]) -> Sequence[Arrival]:
    """The queue with the transfers that no compute step precedes in the order in which they can run.

    What the host writes later lets others go first. No rate is known: bytes are weighed as most machines move them.
    """
    head = [arrival for arrival in queue if arrival.after < 0 and arrival.is_load]
    rest = [arrival for arrival in queue if not (arrival.after < 0 and arrival.is_load)]
    begins = {arrival: 0.0 for arrival in head}  # in bytes of the link
    begins |= {a: written[a.block].host_bytes / HOST_BY_LINK for a in head if a.block in written}
    begun: list[Arrival] = []
    moved = 0.0
    for _ in head:
        left = (arrival for arrival in head if arrival not in begun)
        begun.append(min(left, key=lambda arrival: (max(moved, begins[arrival]), arrival.needed)))
        moved = max(moved, begins[begun[-1]]) + workload.blocks[begun[-1].block].state_bytes
    return [*begun, *rest]
