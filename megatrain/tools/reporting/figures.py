"""StepFigures: everything that a report says of a step; the bytes that live at each moment, and what holds the peak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatrain.base.sizes import format_bytes
from megatrain.scheduler.bands import Band
from megatrain.scheduler.instructions import Instructions
from megatrain.scheduler.items import ITEMS, Effect, Item
from megatrain.scheduler.lifetimes import Books, Lifetime, Peak, alive_at, find_peak
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.table import Op, Position


@dataclass(frozen=True)
class StepFigures:
    """A step in figures, as planned and as measured.

    Args:
        sources: The user's line with which each block begins, `model.py:41: ...`; empty where none is known.
    """

    name: str
    schedule: Schedule
    sources: tuple[str, ...]
    instructions: Instructions
    plan: Band
    measured: Band | None

    @property
    def bands(self) -> tuple[Band, ...]:
        """The plan, and the measured step if there is one."""
        return (self.plan,) if self.measured is None else (self.plan, self.measured)

    @property
    def verdict(self) -> tuple[str, ...]:
        """What bounds the step, in words: a line for the plan, and two for the measured step."""
        lines = [self.plan.words()]
        if self.measured is not None:
            lines.append(self.measured.words())
            lines.append(f"the measured step took {compared(self.measured.step_s, self.plan.step_s)}")
        return tuple(lines)

    @cached_property
    def peak(self) -> AtPeak:
        """What takes the device's memory at the peak."""
        return at_peak(self.schedule, self._books)

    @cached_property
    def device_curves(self) -> tuple[Curve, ...]:
        """Of each band, the bytes that live on the device: planned sizes at the moments of the band."""
        return tuple(device_curve(self._books, self.instructions, band) for band in self.bands)

    @cached_property
    def effects(self) -> Mapping[Position, Effect]:
        """What each op does: the bytes that it moves, its floating-point operations."""
        return dict(self._books.ops)

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """All ops, in table order."""
        return tuple(self.schedule.ops)

    def op_name(self, index: int) -> str:
        """Of an op in table order; a star marks blocks whose graph is retained."""
        op = self.ops[index]
        return f"{op}*" if op.what in "FB" and op.block in self.schedule.saves else str(op)

    def source(self, block: int) -> str:
        """The user's line with which a block begins, if any is known."""
        return self.sources[block] if self.sources and block >= 0 else ""

    @cached_property
    def _books(self) -> Books:
        return Books(self.schedule)


def compared(measured_s: float, plan_s: float) -> str:
    """Says how much longer the measured step took than the plan.

    >>> compared(1.3, 1.0)
    '30% longer than the plan'
    """
    ratio = measured_s / plan_s if plan_s > 0 else 1.0
    if abs(ratio - 1) < 0.005:
        return "as long as the plan"
    if ratio >= 2:
        return f"{ratio:.3g} times as long as the plan"
    return f"{abs(ratio - 1):.0%} {'longer' if ratio > 1 else 'shorter'} than the plan"


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes over time. The sizes are the plan's; the moments are those of a band.

    Args:
        points: A moment in seconds, and the bytes of each part from then on. The first is at 0.
    """

    parts: tuple[str, ...]
    points: tuple[tuple[float, tuple[int, ...]], ...]

    @property
    def totals(self) -> list[tuple[float, int]]:
        """Each moment with the bytes of all parts."""
        return [(moment, sum(sizes)) for moment, sizes in self.points]


class _Span(NamedTuple):
    part: str
    nbytes: int
    begin_s: float
    end_s: float


def device_curve(books: Books, instructions: Instructions, band: Band) -> Curve:
    """All that a step holds on the device, released where the instructions say so."""
    times, step_s = {timing.position: timing for timing in band.timeline}, band.step_s
    released = _releases(instructions, band)
    spans = [_Span("weights", books.table.arena_bytes, 0.0, step_s)]
    shared: dict[tuple[int, int, int], list[_Span]] = {}
    for life in books.lifetimes:
        if life.memory == "device":
            taken = None if life.start is None else times[life.start]
            begin = 0.0 if taken is None else taken.end_s if life.is_brought else taken.start_s
            span = _Span(ITEMS[life.item.kind].part, life.nbytes, begin, released.get(life.item, step_s))
            if life.storage is None:
                spans.append(span)
            else:
                shared.setdefault((life.storage, life.item.micro_batch, life.nbytes), []).append(span)
    for position, op in books.table.positions():
        timing = times[position]
        spans.append(_Span("workspace", books.effects.of(*op.key).workspace, timing.start_s, timing.end_s))
    return _curve([*spans, *(span for lives in shared.values() for span in _apart(lives))])


def _releases(instructions: Instructions, band: Band) -> dict[Item, float]:
    times, step_s = {timing.position: timing for timing in band.timeline}, band.step_s
    found = dict[Item, float]()
    for half, is_last in ((instructions.forward, False), (instructions.backward, True)):
        for each in half.instructions:
            found |= dict.fromkeys(each.frees_before, times[each.position].start_s)
            found |= dict.fromkeys(each.frees_after, times[each.position].end_s)
        is_end = is_last or not half.instructions
        found |= dict.fromkeys(half.frees, step_s if is_end else times[half.instructions[-1].position].end_s)
    return found


def _apart(spans: list[_Span]) -> list[_Span]:
    """What shares memory, as spans that don't overlap."""
    merged: list[_Span] = []
    for span in sorted(spans, key=lambda span: span.begin_s):
        if merged and span.begin_s <= merged[-1].end_s:
            merged[-1] = merged[-1]._replace(end_s=max(span.end_s, merged[-1].end_s))
        else:
            merged.append(span)
    return merged


def _curve(spans: Iterable[_Span]) -> Curve:
    changes: dict[float, dict[str, int]] = {0.0: {}}
    live: dict[str, int] = {}
    for part, nbytes, begin, end in (span for span in spans if span.nbytes > 0):
        live[part] = 0
        for moment, change in ((begin, nbytes), (end, -nbytes)):
            here = changes.setdefault(moment, {})
            here[part] = here.get(part, 0) + change
    points: list[tuple[float, tuple[int, ...]]] = []
    for moment, change in sorted(changes.items()):
        if any(change.values()) or not points:
            for part, nbytes in change.items():
                live[part] += nbytes
            points.append((moment, tuple(live.values())))
    return Curve(tuple(live), tuple(points))


class PeakHolder(NamedTuple):
    """Something that takes memory.

    Attributes:
        name: `value add_3 of micro-batch 1`, `graph of block 5 (layers.4)`.
    """

    name: str
    part: str
    nbytes: int


class AtPeak(NamedTuple):
    """The peak of a schedule.

    Attributes:
        holders: What takes the memory then, largest first; together the schedule's `device_bytes`.
    """

    peak: Peak
    holders: tuple[PeakHolder, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all holders."""
        return sum(holder.nbytes for holder in self.holders)

    def most(self) -> str:
        """Names the kind that takes most, and its largest holder."""
        if not self.peak.parts:
            return "nothing"
        part, nbytes = self.peak.parts[0]
        first, *others = (holder for holder in self.holders if holder.part == part)
        share = f"{nbytes / self.nbytes:.0%} for"
        return f"{share} {part}, the largest {first.name}" if others else f"{share} {first.name}"

    @property
    def place(self) -> str:
        """The op of the peak, and its tick."""
        return f"{self.peak.op} (tick {self.peak.tick})"

    def words(self) -> tuple[str, ...]:
        """Names the peak and what holds most of it, and then its parts."""
        parts = ", ".join(f"{part} {format_bytes(nbytes)}" for part, nbytes in self.peak.parts)
        return f"peak: {format_bytes(self.nbytes)} at {self.place}, {self.most()}", f"at the peak: {parts or 'nothing'}"


def at_peak(schedule: Schedule, books: Books) -> AtPeak:
    """Finds the peak and its holders."""
    peak = find_peak(schedule)
    found = [*_weights(schedule, books, peak.tick)]
    for life in alive_at(books, peak.moment):
        found.append(PeakHolder(_name(schedule, life), ITEMS[life.item.kind].part, life.nbytes))
    for op in () if peak.is_after else schedule.ticks[peak.tick].values():
        nbytes = books.effects.of(*op.key).workspace
        of_loss = 0 < nbytes == books.effects.loss_workspace(*op.key[1:])
        name = "the loss" if of_loss else f"workspace of {op}"
        found.append(PeakHolder(name, "loss" if of_loss else "workspace", nbytes))
    found = [holder for holder in found if holder.nbytes != 0]
    return AtPeak(peak, tuple(sorted(found, key=lambda h: (-h.nbytes, h.part, h.name))))


def _weights(schedule: Schedule, books: Books, tick: int) -> Iterator[PeakHolder]:
    """The weights in the slots at a tick, from their `W` to their last reader, and what is left of the arena."""
    last: dict[int, int] = {}
    for reader, load in schedule.bindings().items():
        last[load.tick] = max(last.get(load.tick, 0), reader.tick)
    rest = schedule.arena_bytes
    for position, op in schedule.positions():
        begin, end = position.tick, max(position.tick, last.get(position.tick, 0))
        is_there = op.block in schedule.device_updates
        if op.what == "W" and (is_there or op.block in schedule.persistent or begin <= tick <= end):
            work = schedule.known_workload().blocks[op.block]
            nbytes = books.effects.copied(work.state_bytes)
            rest -= nbytes + work.optimizer_bytes * is_there
            yield PeakHolder(f"weights of {_block(schedule, op.block)}", "weights", nbytes)
            if is_there:
                name = f"optimizer state of {_block(schedule, op.block)}"
                yield PeakHolder(name, "weights", work.optimizer_bytes)
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
