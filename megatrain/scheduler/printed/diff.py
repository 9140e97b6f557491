"""diff(): how another schedule differs, in words and then op by op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from difflib import SequenceMatcher
from typing import NamedTuple

from megatrain.counts import counted
from megatrain.scheduler.effects import streams
from megatrain.scheduler.items import Stream
from megatrain.scheduler.op import Op
from megatrain.scheduler.printed.block_ranges import ranges
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Table

EQUAL = "the schedules are equal"


class _Key(NamedTuple):
    """The identity of an op across two schedules: neither its tick nor its slot."""

    stream: Stream
    what: str
    block: int
    micro_batch: int
    nth: int


class _Standing(NamedTuple):
    """An op where it stands: its tick, and the same as seen from the compute stream.

    Args:
        op: As the schedule has it.
        tick: Its row.
        ahead: How many ticks before `beside`; negative after it.
        beside: The op of the compute stream at that tick, or the next one, or the last one of all.
    """

    op: Op
    tick: int
    ahead: int
    beside: Op | None

    @property
    def anchor(self) -> object:
        """Equal if two ops share a tick with the same op: F2 of a call is F2.0 of a step."""
        at = self.beside
        return None if at is None else (self.ahead, at.what, at.block, at.micro_batch or 0)

    @property
    def where(self) -> str:
        """In words: `with F2`."""
        if self.beside is None:
            return "without computation"
        count = counted(abs(self.ahead), "tick")
        return (
            f"with {self.beside}"
            if not self.ahead
            else f"{count} {'before' if self.ahead > 0 else 'after'} {self.beside}"
        )


def diff(schedule: Table, other: Table) -> str:
    """Says how `other` differs: first how much, in words and bytes, then which ops.

    An op has moved if it shares a tick with another op of the compute stream, or has another order with it: one more
    tick at the beginning moves no op.

    Args:
        schedule: The first schedule.
        other: The second schedule.
    """
    if schedule == other:
        return EQUAL
    summary = ", ".join(_counts(schedule, other)) or "as many graphs, parks and ticks"
    lines = [f"the other schedule: {summary}", *(f"  {line}" for line in _figures(schedule, other))]
    ops = [f"  {line}" for line in _op_lines(_placed(schedule), _placed(other))]
    if not ops and schedule.ticks != other.ticks:
        ops = ["  the same ops in the same order, at other ticks"]
    return "\n".join([*lines, *ops])


def figure_lines(schedule: Table, other: Table) -> list[str]:
    """What differs as a whole: how many graphs, parks, slots and ticks, and figures before and after."""
    return [*([", ".join(counts)] if (counts := [*_counts(schedule, other)]) else []), *_figures(schedule, other)]


def _counts(schedule: Table, other: Table) -> Iterator[str]:
    """How much more or fewer of what changes with a budget: `3 graphs more kept`."""
    for noun, what, before, after in (
        ("block", "", schedule.num_blocks, other.num_blocks),
        ("graph", " kept", len(schedule.saves), len(other.saves)),
        ("block", " recomputed", _recomputed(schedule), _recomputed(other)),
        ("park", "", _parks(schedule), _parks(other)),
        ("slot", "", schedule.num_slots, other.num_slots),
        ("tick", "", len(schedule.ticks), len(other.ticks)),
    ):
        count = abs(after - before)
        if count:
            yield f"{counted(count, noun)} {'more' if after > before else 'fewer'}{what}"


def _recomputed(table: Table) -> int:
    """How many blocks run their forward again before their backward."""
    if table.kind.mode == "forward":
        return 0
    return len({op.block for op in table.ops if op.what == "B"}.difference(table.saves))


def _parks(table: Table) -> int:
    """How many times activations leave the device between forward and backward."""
    return sum(op.what == "A" and op.stream == Stream.D2H for op in table.ops)


def _figures(schedule: Table, other: Table) -> Iterator[str]:
    for what, names in (("bytes", ("device", "peak", "host")), ("bytes moved", ("h2d", "d2h"))):
        sizes = [(name, getattr(schedule, f"{name}_bytes"), getattr(other, f"{name}_bytes")) for name in names]
        changed = [f"{name} {before} -> {after}" for name, before, after in sizes if before != after]
        if changed:
            yield f"{what}: {', '.join(changed)}"
    kinds = [
        (part.name, getattr(schedule.kind, part.name), getattr(other.kind, part.name)) for part in fields(StepKind)
    ]
    if schedule.kind != other.kind:
        yield "kind: " + ", ".join(f"{name} {before} -> {after}" for name, before, after in kinds if before != after)
    for name, before, after in (
        ("graphs kept", _blocks(schedule.saves), _blocks(other.saves)),
        ("results kept", _blocks(schedule.results), _blocks(other.results)),
        ("inputs kept of the last blocks", str(schedule.keep), str(other.keep)),
        ("blocks persistent", _blocks(schedule.persistent), _blocks(other.persistent)),
        ("slots", _slots(schedule), _slots(other)),
        ("places", _places(schedule), _places(other)),
    ):
        if before != after:
            yield f"{name}: {before} -> {after}"
    if len(schedule.ticks) == len(other.ticks):
        live = [
            i for i, pair in enumerate(zip(schedule.live_bytes, other.live_bytes, strict=True)) if pair[0] != pair[1]
        ]
        if live:
            yield f"live bytes: others at ticks {_blocks(live)}"


def _blocks(numbers: Sequence[int]) -> str:
    return ", ".join(ranges(numbers)) or "none"


def _slots(table: Table) -> str:
    return ", ".join(f"{slot.offset}+{slot.nbytes}" for slot in table.slots) or "none"


def _places(table: Table) -> str:
    return ", ".join(f"{place.block} = {place.offset}+{place.nbytes}" for place in table.places) or "none"


def _placed(table: Table) -> dict[_Key, _Standing]:
    """Every op of a schedule with its place, in the order of `Table.ops`."""
    seen: Counter[tuple[Stream, str, int, int]] = Counter()
    computes = [(position.tick, op) for position, op in table.positions() if op.stream == Stream.COMPUTE]
    found: dict[_Key, _Standing] = {}
    following = 0
    for position, op in table.positions():
        while following < len(computes) and computes[following][0] < position.tick:
            following += 1
        same = op.key
        found[_Key(*same, seen[same])] = _Standing(op, position.tick, *_seen_from(position.tick, computes, following))
        seen[same] += 1
    return found


def _seen_from(tick: int, computes: Sequence[tuple[int, Op]], following: int) -> tuple[int, Op | None]:
    """The compute op nearest to a tick, and how many ticks that op is ahead."""
    if not computes:
        return 0, None
    at, op = computes[min(following, len(computes) - 1)]
    return at - tick, op


def _op_lines(before: dict[_Key, _Standing], after: dict[_Key, _Standing]) -> Iterator[str]:
    """A line per op that is gone, new, or elsewhere, stream by stream."""
    for stream in streams():
        for key, placed in before.items():
            if key.stream == stream and key not in after:
                yield f"vanished: {placed.op} ({stream}, tick {placed.tick})"
        for key, placed in after.items():
            if key.stream == stream and key not in before:
                yield f"appeared: {placed.op} ({stream}, tick {placed.tick})"
        yield from _moved_lines(stream, before, after)


def _moved_lines(stream: Stream, before: dict[_Key, _Standing], after: dict[_Key, _Standing]) -> Iterator[str]:
    stays = _in_order(before, after)
    for key, old in before.items():
        if key.stream != stream or key not in after:
            continue
        new = after[key]
        slot = "" if old.op.slot == new.op.slot else f", now in slot {new.op.slot}"
        is_moved = key not in stays if stream == Stream.COMPUTE else old.anchor != new.anchor
        if is_moved or slot:
            where = "" if not is_moved or stream == Stream.COMPUTE else f": {old.where} -> {new.where}"
            ticks = f"tick {old.tick}" if old.tick == new.tick else f"tick {old.tick} -> {new.tick}"
            yield f"{'moved' if is_moved else 'stays'}: {old.op} ({stream}, {ticks}){where}{slot}"


def _in_order(before: dict[_Key, _Standing], after: dict[_Key, _Standing]) -> set[_Key]:
    """Ops of the compute stream that come in the same order in both."""
    orders = [[key for key in placed if key.stream == Stream.COMPUTE] for placed in (before, after)]
    found: set[_Key] = set()
    for match in SequenceMatcher(None, *orders, autojunk=False).get_matching_blocks():
        found.update(orders[0][match.a : match.a + match.size])
    return found
