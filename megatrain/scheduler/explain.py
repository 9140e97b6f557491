"""Explanations of a schedule: why an op waits, a picture of a step in time, and how two schedules differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from difflib import SequenceMatcher
from itertools import islice
from typing import NamedTuple

import networkx as nx

from megatrain.base.checks import shown
from megatrain.base.counts import counted
from megatrain.errors import ScheduleError
from megatrain.hardware.work import Works, total_bytes, total_flops, total_kernels
from megatrain.scheduler.bands import band_of
from megatrain.scheduler.dependency import dependency_graph
from megatrain.scheduler.effects import streams
from megatrain.scheduler.items import Stream
from megatrain.scheduler.simulate import Costs, Timing, simulate
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Op, Position, Table
from megatrain.scheduler.text import ranges
from megatrain.scheduler.workload import BlockWork, ValueWork, Workload

# What each kind of dependency means, with the earlier op in the place of the braces.
_REASONS = {
    "data": "needs what {} makes",
    "weight": "needs the weights that {} brings",
    "resource": "writes where {} still reads",
    "memory": "takes memory that {} releases",
    "stream": "comes after {} in its stream",
}


def why(schedule: Table, op: str, tick: int | None = None) -> str:
    """As `Schedule.why`."""
    graph, ops = dependency_graph(schedule), dict(schedule.positions())
    lines: list[str] = []
    position: Position | None = _found(ops, op, tick)
    while position is not None:
        before = _latest_first(graph, position)
        reasons = [_REASONS[graph.edges[p, position]["kind"]].format(_name(p, ops)) for p in before]
        lines += [_name(position, ops), *(f"  {reason}" for reason in reasons or ["waits for nothing"])]
        position = before[0] if before else None
    return "\n".join(lines)


def _found(ops: dict[Position, Op], name: str, tick: int | None) -> Position:
    found = [position for position, op in ops.items() if str(op) == name]
    at = [position for position in found if tick in (None, position.tick)]
    if not at:
        where = f" at tick {tick}" if found else ""
        others = f"It is at ticks {', '.join(str(p.tick) for p in found)}." if found else "Look at print(schedule)."
        raise ScheduleError(
            f"the schedule has no op `{name}`{where}.\n  An op is named as the table prints it, without a star.\n"
            f"  {others}"
        )
    return at[0]


def _latest_first(graph: nx.DiGraph[Position], position: Position) -> list[Position]:
    """The last op of each stream that it depends on; earlier ones follow from these."""
    latest = {before.stream: before for before in sorted(graph.predecessors(position))}
    return sorted(latest.values(), key=lambda p: (-p.tick, p.stream))


def _name(position: Position, ops: dict[Position, Op]) -> str:
    return f"{ops[position]} ({position.stream}, tick {position.tick})"


def gantt(schedule: Table, costs: Costs, *, width: int = 100) -> str:
    """As `Schedule.gantt`."""
    simulation = simulate(schedule, costs)
    path = set(band_of("plan", "", schedule, simulation.timeline).path)
    drawn = {p: op.what if i in path else op.what.lower() for i, (p, op) in enumerate(schedule.positions())}
    slice_s = simulation.step_s / width
    lines = [f"{simulation}; {slice_s * 1e3:.3g} ms a character"]
    names = max(map(len, streams()))
    for stream in streams():
        timings = [timing for timing in simulation.timeline if timing.position.stream == stream]
        if timings:
            lines.append(f"{stream:{names}}  {_row(timings, drawn, slice_s, width)}")
    return "\n".join(lines)


def _row(timings: Sequence[Timing], drawn: dict[Position, str], slice_s: float, width: int) -> str:
    """Ops of one stream follow each other, so one pass over both finds the longest in each slice."""
    cells = ["."] * width
    longest = [0.0] * width
    for timing in timings if slice_s > 0 else ():
        first = min(width - 1, int(timing.start_s / slice_s))
        last = min(width - 1, int(timing.end_s / slice_s))
        for cell in range(first, last + 1):
            inside = min(timing.end_s, (cell + 1) * slice_s) - max(timing.start_s, cell * slice_s)
            if inside > longest[cell]:
                cells[cell], longest[cell] = drawn[timing.position], inside
    return "".join(cells)


# More differences are of the same kind.
_MOST = 8


def workload_lines(workload: Workload, other: Workload) -> list[str]:
    """A line for each block and value that differs; the last says that there are more."""
    found = list(islice(_lines(workload, other), _MOST + 1))
    return found if len(found) <= _MOST else [*found[:_MOST], "and more"]


def _lines(workload: Workload, other: Workload) -> Iterator[str]:
    for name in ("blocks", "values", "storages"):
        here, there = len(getattr(workload, name)), len(getattr(other, name))
        if here != there:
            yield f"{name}: {here} -> {there}"
    # Inputs come first: they are what a caller knows.
    yield from _values(workload, other, are_inputs=True)
    for index, (block, new) in enumerate(zip(workload.blocks, other.blocks, strict=False)):
        yield from _fields(f"block {index} ({block.name})", block, new)
    yield from _values(workload, other, are_inputs=False)
    if len(workload.storages) == len(other.storages):
        for index, (size, new_size) in enumerate(zip(workload.storages, other.storages, strict=True)):
            if size != new_size:
                yield f"storage {index}: {size} -> {new_size} B"
    if workload.loss_bytes != other.loss_bytes:
        yield f"the loss: {workload.loss_bytes} -> {other.loss_bytes} B"
    if workload.last_reads_values != other.last_reads_values:
        told = [("not read", "read")[each.last_reads_values] for each in (workload, other)]
        yield f"values of the last block, by Python code: {' -> '.join(told)}"


def _values(workload: Workload, other: Workload, *, are_inputs: bool) -> Iterator[str]:
    for index, (value, found) in enumerate(zip(workload.values, other.values, strict=False)):
        if (value.producer is None) == are_inputs:
            yield from _fields(f"value {index} ({value.name})", value, found)


def _fields(owner: str, one: BlockWork | ValueWork, other: BlockWork | ValueWork) -> Iterator[str]:
    if one == other:
        return
    changed: list[str] = []
    for part in fields(one):
        here, there = getattr(one, part.name), getattr(other, part.name)
        if here != there:
            words = _work if part.name in ("forward", "backward") else shown
            changed.append(f"{part.name} {words(here)} -> {words(there)}")
    yield f"{owner}: {', '.join(changed)}"


def _work(works: Works) -> str:
    return f"{total_flops(works)} FLOPs, {total_bytes(works)} B, {total_kernels(works)} kernels"


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
    """As `Schedule.diff`."""
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
        ("block", " recomputed", len(schedule.recomputed), len(other.recomputed)),
        ("park", "", schedule.num_parks, other.num_parks),
        ("slot", "", schedule.num_slots, other.num_slots),
        ("tick", "", len(schedule.ticks), len(other.ticks)),
    ):
        count = abs(after - before)
        if count:
            yield f"{counted(count, noun)} {'more' if after > before else 'fewer'}{what}"


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
        ("blocks with recorded kernels", _blocks(schedule.recorded), _blocks(other.recorded)),
        ("inputs kept of the last blocks", str(schedule.keep), str(other.keep)),
        ("blocks persistent", _blocks(schedule.persistent), _blocks(other.persistent)),
        ("blocks updated on the device", _blocks(schedule.device_updates), _blocks(other.device_updates)),
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
