"""holders(): what takes the device's memory at the peak of a schedule, by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatrain.scheduler.items import ITEMS
from megatrain.scheduler.lifetimes.books import Books
from megatrain.scheduler.lifetimes.lifetime import Lifetime
from megatrain.scheduler.lifetimes.peak import Peak, alive_at, find_peak
from megatrain.scheduler.op import Op
from megatrain.scheduler.schedule import Schedule
from megatrain.sizes import format_bytes


class PeakHolder(NamedTuple):
    """Something that takes memory.

    Attributes:
        name: `value add_3 of micro-batch 1`, `graph of block 5 layers.4`.
        part: Its kind, as in the account of a peak.
        nbytes: Its bytes.
    """

    name: str
    part: str
    nbytes: int


class AtPeak(NamedTuple):
    """The peak of a schedule.

    Attributes:
        peak: The tick that needs most, and its parts.
        holders: What takes the memory then, largest first; together the schedule's `device_bytes`.
    """

    peak: Peak
    holders: tuple[PeakHolder, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all holders."""
        return sum(holder.nbytes for holder in self.holders)

    def of(self, part: str) -> list[PeakHolder]:
        """The holders of one kind, largest first."""
        return [holder for holder in self.holders if holder.part == part]

    def most(self) -> str:
        """Names the kind that takes most, and its largest holder."""
        if not self.peak.parts:
            return "nothing"
        part, nbytes = self.peak.parts[0]
        first, *others = self.of(part)
        share = f"{nbytes / self.nbytes:.0%} for"
        return f"{share} {part}, the largest {first.name}" if others else f"{share} {first.name}"

    def words(self) -> tuple[str, ...]:
        """Names the peak and what holds most of it, and then its parts."""
        place = f"at {self.peak.op} (tick {self.peak.tick})"
        parts = ", ".join(f"{part} {format_bytes(nbytes)}" for part, nbytes in self.peak.parts)
        return f"peak: {format_bytes(self.nbytes)} {place}, {self.most()}", f"at the peak: {parts or 'nothing'}"


def at_peak(schedule: Schedule, books: Books) -> AtPeak:
    """Finds the peak and its holders.

    Args:
        schedule: The schedule.
        books: Of the schedule.
    """
    peak = find_peak(schedule)
    found = [*_states(schedule, books, peak.tick)]
    for life in alive_at(books, peak.moment):
        found.append(PeakHolder(_name(schedule, life), ITEMS[life.item.kind].part, life.nbytes))
    for op in () if peak.is_after else schedule.ticks[peak.tick].values():
        nbytes = books.effects.workspace(*op.key)
        of_loss = 0 < nbytes == books.effects.loss_workspace(*op.key[1:])
        name = "the loss" if of_loss else f"workspace of {op}"
        found.append(PeakHolder(name, "loss" if of_loss else "workspace", nbytes))
    found = [holder for holder in found if holder.nbytes != 0]
    return AtPeak(peak, tuple(sorted(found, key=lambda h: (-h.nbytes, h.part, h.name))))


class SlotStay(NamedTuple):
    """The time that a block's weights lie in a slot.

    Attributes:
        op: The `W` that brings them.
        first: Its tick; the first of all for a persistent block.
        last: The tick of the last op that reads them; the last of all for a persistent block.
    """

    op: Op
    first: int
    last: int


def slot_stays(schedule: Schedule) -> tuple[SlotStay, ...]:
    """All stays, by their first tick."""
    last: dict[int, int] = {}
    for reader, load in schedule.bindings().items():
        last[load.tick] = max(last.get(load.tick, 0), reader.tick)
    found = [
        SlotStay(op, 0, len(schedule.ticks) - 1)
        if op.block in schedule.persistent
        else SlotStay(op, position.tick, max(position.tick, last.get(position.tick, 0)))
        for position, op in schedule.positions()
        if op.slot is not None
    ]
    return tuple(sorted(found, key=lambda stay: stay.first))


def _states(schedule: Schedule, books: Books, tick: int) -> Iterator[PeakHolder]:
    """The weights in the slots, and what is left of the arena."""
    rest = schedule.arena_bytes
    for stay in slot_stays(schedule):
        if stay.first <= tick <= stay.last:
            nbytes = books.effects.copied(schedule.known_workload().blocks[stay.op.block].state_bytes)
            rest -= nbytes
            yield PeakHolder(f"weights of {_block(schedule, stay.op.block)}", "weights", nbytes)
    yield PeakHolder("free slots", "weights", rest)


def _name(schedule: Schedule, life: Lifetime) -> str:
    kind, number, micro_batch = life.item
    micro = f" of micro-batch {micro_batch}" if schedule.kind.micro_batches > 1 else ""
    if kind == "saved":
        return f"graph of {_block(schedule, number)}{micro}"
    if kind == "parameters":
        return f"gradients of {_block(schedule, number)}"
    value = schedule.known_workload().values[number].name
    return f"{'gradient of ' if kind == 'gradient' else ''}value {value}{micro}"


def _block(schedule: Schedule, number: int) -> str:
    return f"block {number} ({schedule.known_workload().blocks[number].name})"
