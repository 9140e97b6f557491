"""Address maps: which bytes of an arena hold what, tick by tick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatrain.reporting.peak_holders import slot_stays
from megatrain.scheduler.instructions import Instructions
from megatrain.scheduler.items import Stream
from megatrain.scheduler.lifetimes.books import Books
from megatrain.scheduler.lifetimes.lifetime import MOMENTS, span
from megatrain.scheduler.schedule import Schedule


class Area(NamedTuple):
    """Bytes of an arena that hold something for some ticks, both ends inclusive."""

    name: str
    block: int
    offset: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class AddressMap:
    """An arena over the ticks of a schedule.

    Args:
        name: Of the arena.
        memory: `"device"` or `"host"`.
        nbytes: Its size.
        areas: By first tick.
    """

    name: str
    memory: str
    nbytes: int
    areas: tuple[Area, ...]


def address_maps(schedule: Schedule, books: Books, instructions: Instructions) -> tuple[AddressMap, ...]:
    """The maps of all arenas whose addresses are planned and that hold anything.

    Values and gradients on the device have no planned addresses: the device's allocator gives them memory.
    """
    landing = max((place.offset + place.nbytes for place in schedule.places), default=0)
    parks = instructions.park_bytes * schedule.kind.micro_batches
    maps = (
        AddressMap("weights in slots", "device", schedule.arena_bytes, _slots(schedule)),
        AddressMap("parked values", "host", parks, _parks(schedule, instructions)),
        AddressMap("gradients that wait for updates", "host", landing, _landing(schedule, books)),
    )
    return tuple(each for each in maps if each.nbytes > 0 and each.areas)


def _slots(schedule: Schedule) -> tuple[Area, ...]:
    blocks = schedule.known_workload().blocks
    return tuple(
        Area(
            f"weights of block {stay.op.block} in slot {stay.op.slot}",
            stay.op.block,
            schedule.slots[stay.op.slot or 0].offset,
            blocks[stay.op.block].state_bytes,
            stay.first,
            stay.last,
        )
        for stay in slot_stays(schedule)
        if blocks[stay.op.block].state_bytes > 0
    )


def _parks(schedule: Schedule, instructions: Instructions) -> tuple[Area, ...]:
    """Each micro-batch has a range of its own."""
    values, several = schedule.known_workload().values, schedule.kind.micro_batches > 1
    returns = {
        (parked.value, each.micro_batch): each.position.tick
        for each in instructions.all
        if each.op.stream == Stream.H2D
        for parked in each.parked
    }
    return tuple(
        Area(
            f"value {values[parked.value].name}{f' of micro-batch {each.micro_batch}' if several else ''}",
            each.op.block,
            each.micro_batch * instructions.park_bytes + parked.host.offset,
            parked.host.nbytes,
            each.position.tick,
            returns.get((parked.value, each.micro_batch), len(schedule.ticks) - 1),
        )
        for each in instructions.all
        if each.op.stream == Stream.D2H
        for parked in each.parked
        if parked.host.nbytes > 0
    )


def _landing(schedule: Schedule, books: Books) -> tuple[Area, ...]:
    places = {place.block: place for place in schedule.places}
    found: list[Area] = []
    for life in books.lifetimes:
        place = places.get(life.item.number)
        if life.memory == "landing" and place is not None and place.nbytes > 0:
            earlier = ", of the step before" if life.item.kind == "waiting" else ""
            name = f"gradients of block {place.block}{earlier}"
            first, last = (moment // MOMENTS for moment in span(life, len(schedule.ticks)))
            found.append(Area(name, place.block, place.offset, place.nbytes, first, last))
    return tuple(sorted(found, key=lambda area: (area.first, area.offset)))
