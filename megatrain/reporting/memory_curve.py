"""Curve: the bytes that live at each moment of a band, by part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from megatrain.scheduler.instructions import Instructions
from megatrain.scheduler.items import ITEMS, Item, Stream
from megatrain.scheduler.lifetimes.books import Books
from megatrain.scheduler.table import Position
from megatrain.scheduler.timing.bands import Band


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes over time. The sizes are the plan's; the moments are those of a band.

    Args:
        parts: What the bytes are.
        points: A moment in seconds, and the bytes of each part from then on. The first is at 0.
    """

    parts: tuple[str, ...]
    points: tuple[tuple[float, tuple[int, ...]], ...]

    @property
    def totals(self) -> list[tuple[float, int]]:
        """Each moment with the bytes of all parts."""
        return [(moment, sum(sizes)) for moment, sizes in self.points]


class Instant(NamedTuple):
    """The beginning or the end of an op; without an op those of the step."""

    position: Position | None
    is_end: bool


START, END = Instant(None, False), Instant(None, True)


class LiveSpan(NamedTuple):
    """Bytes that live for a while.

    Attributes:
        part: What they are.
        nbytes: How many.
        since: When they are taken.
        until: They are released when the last of these moments is over.
        shared: What lives in the same memory has the same key, and counts once; None for what shares none.
    """

    part: str
    nbytes: int
    since: Instant
    until: tuple[Instant, ...]
    shared: tuple[int, ...] | None = None


def held_on_device(books: Books, instructions: Instructions) -> list[LiveSpan]:
    """All that a step holds on the device; released where the instructions say so.

    Args:
        books: Of the schedule.
        instructions: Of the schedule.
    """
    released = _releases(instructions)
    found = [LiveSpan("weights", books.table.arena_bytes, START, (END,))]
    for life in books.lifetimes:
        if life.memory == "device":
            since = START if life.start is None else Instant(life.start, life.is_brought)
            shared = None if life.storage is None else (life.storage, life.item.micro_batch, life.nbytes)
            part = ITEMS[life.item.kind].part
            found.append(LiveSpan(part, life.nbytes, since, (released.get(life.item, END),), shared))
    for position, op in books.table.positions():
        nbytes = books.effects.workspace(*op.key)
        found.append(LiveSpan("workspace", nbytes, Instant(position, False), (Instant(position, True),)))
    return [held for held in found if held.nbytes > 0]


def held_on_host(books: Books, instructions: Instructions) -> list[LiveSpan]:
    """Parked values, and gradients that wait for their norm and their updates. State isn't counted."""
    found: list[LiveSpan] = []
    returns = {
        (parked.value, each.micro_batch): each.position
        for each in instructions.all
        if each.op.stream == Stream.H2D
        for parked in each.parked
    }
    for each in instructions.all:
        for parked in each.parked if each.op.stream == Stream.D2H else ():
            back = returns.get((parked.value, each.micro_batch))
            until = END if back is None else Instant(back, True)
            found.append(LiveSpan("parked values", parked.host.nbytes, Instant(each.position, False), (until,)))
    for life in books.lifetimes:
        if life.memory == "landing":
            since = START if life.start is None else Instant(life.start, False)
            until = tuple(Instant(end, True) for end in life.ends) or (END,)
            found.append(LiveSpan("gradients", life.nbytes, since, until))
    return [held for held in found if held.nbytes > 0]


def curve(held: Iterable[LiveSpan], band: Band) -> Curve:
    """The bytes at each moment of a band.

    Args:
        held: From `held_on_device` or `held_on_host`.
        band: Whose times count.
    """
    starts = {timing.position: timing.start_s for timing in band.timeline}
    ends = {timing.position: timing.end_s for timing in band.timeline}

    def at(moment: Instant) -> float:
        if moment.position is None:
            return band.step_s if moment.is_end else 0.0
        return (ends if moment.is_end else starts)[moment.position]

    single: list[tuple[str, int, float, float]] = []
    groups: dict[tuple[int, ...], list[tuple[str, int, float, float]]] = {}
    for each in held:
        span = (each.part, each.nbytes, at(each.since), max(map(at, each.until)))
        (single if each.shared is None else groups.setdefault(each.shared, [])).append(span)
    return _points(chain(single, chain.from_iterable(map(_union, groups.values()))))


def _releases(instructions: Instructions) -> Mapping[Item, Instant]:
    found: dict[Item, Instant] = {}
    for half, is_last in ((instructions.forward, False), (instructions.backward, True)):
        for each in half.instructions:
            found |= dict.fromkeys(each.frees_before, Instant(each.position, False))
            found |= dict.fromkeys(each.frees_after, Instant(each.position, True))
        over = END if is_last or not half.instructions else Instant(half.instructions[-1].position, True)
        found |= dict.fromkeys(half.frees, over)
    return found


def _union(spans: list[tuple[str, int, float, float]]) -> Iterator[tuple[str, int, float, float]]:
    """What shares memory, as spans that don't overlap."""
    part, nbytes = spans[0][:2]
    merged: list[tuple[float, float]] = []
    for _, _, begin, end in sorted(spans, key=lambda span: span[2]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    yield from ((part, nbytes, begin, end) for begin, end in merged)


def _points(spans: Iterable[tuple[str, int, float, float]]) -> Curve:
    changes: dict[float, dict[str, int]] = {0.0: {}}
    parts: dict[str, None] = {}
    for part, nbytes, begin, end in spans:
        parts[part] = None
        for moment, change in ((begin, nbytes), (end, -nbytes)):
            here = changes.setdefault(moment, {})
            here[part] = here.get(part, 0) + change
    live = dict.fromkeys(parts, 0)
    points: list[tuple[float, tuple[int, ...]]] = []
    for moment, change in sorted(changes.items()):
        if any(change.values()) or not points:
            for part, nbytes in change.items():
                live[part] += nbytes
            points.append((moment, tuple(live.values())))
    return Curve(tuple(parts), tuple(points))
