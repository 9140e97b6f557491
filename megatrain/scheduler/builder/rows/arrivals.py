"""Arrivals: the queue of the transfers to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from megatrain.scheduler.builder.stays import Stage, Stay
from megatrain.scheduler.items import Sections
from megatrain.scheduler.workload import Workload

# A block and one of its sections; None is the whole block.
Part = tuple[int, int | None]


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
    section: int | None
    stay: int | None


def arrivals(
    stages: Sequence[Stage],
    stays: Sequence[Stay],
    parked: Mapping[int, Sequence[int]],
    num_slots: int,
    sections: Sections | None,
) -> list[Arrival]:
    """All transfers to the device, in the order of their queue."""
    divided = next((i for i, stay in enumerate(stays) if sections is not None and stay.block == sections.block), None)
    starts = [0, *accumulate(len(stage) for stage in stages)]
    found: list[Arrival] = []
    free = -len(stages)
    for index, stay in enumerate(stays):
        # What is needed sooner comes sooner, even if its bytes are free later.
        free = max(free, stay.needed - stay.ahead - 1)
        after = starts[free + 1] - 1 if free >= 0 else free
        for _, section in parts_of(stay.block, sections if index == divided else None):
            found.append(Arrival(after, starts[stay.needed], True, stay.block, 0, section, index))
    for start, stage in zip(starts, stages, strict=False):
        for step, work in enumerate(stage, start):
            if work.what == "B" and work.block in parked:
                found.append(Arrival(step - num_slots, step, False, work.block, work.micro_batch, None, None))
    return sorted(found)


def first_at_once(
    queue: Sequence[Arrival], workload: Workload, written: Mapping[Part, Written], sections: Sections | None
) -> Sequence[Arrival]:
    """The queue with the transfers that no compute step precedes in the order in which they can run.

    What the host writes later lets others go first. No rate is known: bytes are weighed as most machines move them.
    """
    head = [arrival for arrival in queue if arrival.after < 0 and arrival.is_load]
    rest = [arrival for arrival in queue if not (arrival.after < 0 and arrival.is_load)]
    begins = {arrival: 0.0 for arrival in head}  # in bytes of the link
    parts = {arrival: (arrival.block, arrival.section) for arrival in head}
    begins |= {a: written[part].host_bytes / HOST_BY_LINK for a, part in parts.items() if part in written}
    begun: list[Arrival] = []
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
