"""Lifetimes: from which op of a table to which each item takes memory, and how much at each moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import NamedTuple

from megatrain.scheduler.effects import Effects, KnownOp, kind_of
from megatrain.scheduler.items import ITEMS, Effect, Item, Stream
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Op, Position, Table
from megatrain.scheduler.workload import Workload

# Lifetime: from when to when an item takes memory, and how many bytes exist at each moment.
#
# A tick has two moments: while its op of compute runs, and when that op is over. The second has no workspace, and
# nothing that this op was the last to use; memory for what transfers bring is taken then.

# Moments of a tick.
MOMENTS = 2


class Lifetime(NamedTuple):
    """One life of an item, between two moments.

    Attributes:
        last: The last moment, inclusive.
        start: The op with which its memory is taken; None if it exists, or its memory is taken, when the step begins.
        ends: The item is released when all these ops are done: the last of each stream that uses it. Empty if it
            outlives the step.
        storage: The storage that it shares with other items of its micro-batch, whose bytes count once.
        is_brought: A transfer makes it: its memory is taken when the op of `start` is over, not when it begins.
    """

    item: Item
    memory: str
    nbytes: int
    first: int
    last: int
    start: Position | None
    ends: tuple[Position, ...]
    storage: int | None
    is_brought: bool


def live_moments(lives: Iterable[Lifetime], num_ticks: int, base: int = 0) -> tuple[int, ...]:
    """Bytes of one memory that exist at each moment, two for each tick; `base` of them all the time.

    This bounds the memory at run time for any timing, because an op that takes memory waits for the ops of earlier
    ticks that release some (the "memory" edges of the dependency graph). So things that exist at the same time
    pairwise share a moment, and intervals that pairwise meet have a moment in common.
    """
    change = [0] * (MOMENTS * num_ticks + 1)
    change[0] = base
    shared: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for item, _, nbytes, first, last, _, _, storage, _ in lives:
        if storage is not None:
            shared.setdefault((storage, item.micro_batch, nbytes), []).append((first, last))
        else:
            change[first] += nbytes
            change[last + 1] -= nbytes
    for (_, _, nbytes), spans in shared.items():
        for start, end in union(spans):
            change[start] += nbytes
            change[end + 1] -= nbytes
    return tuple(accumulate(change[:-1]))


def live_bytes(lives: Iterable[Lifetime], num_ticks: int, base: int = 0) -> tuple[int, ...]:
    """Bytes that exist in each tick, at the moment that has more; see `live_moments`."""
    return of_ticks(live_moments(lives, num_ticks, base))


def of_ticks(moments: Sequence[int]) -> tuple[int, ...]:
    """The larger figure of each tick, of figures for each moment."""
    return tuple(map(max, moments[::MOMENTS], moments[1::MOMENTS]))


def union(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """All spans, as spans that don't meet."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


# Books: what each op of a table does, and from which op to which each item takes memory.
#
# Generic over the table of effects. The accounting and the instructions follow it; the checker counts for itself.


class Books:
    """The effects of the ops of a table, and the lifetimes that follow.

    Attributes:
        ops: What each op does, in the order of `Table.positions`.
        lifetimes: Those of all items; see `item_lifetimes`.
    """

    def __init__(self, table: Table, workload: Workload | None = None, effects: Effects | None = None) -> None:
        self.table = table if workload is None else replace(table, workload=workload)
        self.workload = self.table.known_workload()
        self.effects = self.table.effects() if effects is None else effects
        known = self.effects.known
        ops = [(position, known(*op.key)) for position, op in table.positions()]
        self.ops = [(position, op.effect) for position, op in ops]
        self.lifetimes = item_lifetimes(self.effects, ops, len(table.ticks))

    def brought(self) -> Iterator[tuple[Position | None, Position, tuple[Item, ...]]]:
        """What transfers bring to the device: with which op its memory is taken, the transfer, and the items."""
        for taker, (position, effect) in zip(takers(position for position, _ in self.ops), self.ops, strict=True):
            made = () if position.stream == Stream.COMPUTE else (*effect.makes, *effect.adds)
            items = tuple([item for item in made if ITEMS[item.kind].memory == "device"])
            if items:
                yield taker, position, items


def takers(positions: Iterable[Position]) -> Iterator[Position | None]:
    """Per op, the op with which the device memory of what it makes is taken; None for the start of the step.

    All of it comes from compute's allocator, where memory that compute releases can be taken at once, in the order of
    the stream. So what a transfer brings to the device takes its memory when the last op of compute of an earlier
    tick is over, and the transfer waits for this op.
    """
    earlier: Position | None = None  # the last op of compute of an earlier tick
    latest: Position | None = None  # and of a tick so far
    for position in positions:
        if latest is not None and latest.tick < position.tick:
            earlier = latest
        if position.stream == Stream.COMPUTE:
            latest = position
            yield position
        else:
            yield earlier


def item_lifetimes(effects: Effects, ops: Sequence[tuple[Position, KnownOp]], num_ticks: int) -> tuple[Lifetime, ...]:
    """All lifetimes: by micro-batch, then in the order of `ITEMS`, then by number."""
    starts, uses = _starts(effects, ops), _last_uses(ops)
    found: list[Lifetime] = []
    for number in sorted({*starts, *chain(*uses)}, key=effects.ranks.__getitem__):
        item, memory, nbytes, storage, outlives = effects.items[number]
        first, start, is_brought = starts.get(number, _AT_START)
        last, ends = MOMENTS * num_ticks - 1, list[Position]()
        if not outlives:
            ends = [of_stream[number] for of_stream in uses if number in of_stream]
            if not ends and start is not None:
                ends = [start]  # nobody reads it: it dies with the op that makes it
            if ends:
                last = max(first, *[_end(position) for position in ends])
        found.append(Lifetime(item, memory, nbytes, first, last, start, tuple(ends), storage, is_brought))
    return tuple(found)


# How a life begins: its first moment, with which op, and whether a transfer brings it.
_Start = tuple[int, Position | None, bool]
_AT_START: _Start = 0, None, False


def _starts(effects: Effects, ops: Sequence[tuple[Position, KnownOp]]) -> dict[int, _Start]:
    """How the lives of items begin that are made, or are there when the step begins."""
    items = effects.items
    starts = dict.fromkeys(effects.numbers(effects.standing()), _AT_START)
    for taker, (position, op) in zip(takers(position for position, _ in ops), ops, strict=True):
        for number in op.takes:
            start: _Start = MOMENTS * position.tick, position, False
            if taker is not position and items[number].memory == "device":
                start = _AT_START if taker is None else (MOMENTS * taker.tick + 1, taker, True)
            if number not in starts or start[0] < starts[number][0]:
                starts[number] = start
    return starts


def _last_uses(ops: Iterable[tuple[Position, KnownOp]]) -> list[dict[int, Position]]:
    """By stream: the last op that uses each item."""
    uses: dict[Stream, dict[int, Position]] = {}
    for position, op in ops:
        if op.uses:
            of_stream = uses.setdefault(position.stream, {})
            for number in op.uses:
                of_stream[number] = position
    return list(uses.values())


def _end(position: Position) -> int:
    """The last moment of what an op is the last to use; what a transfer used is released by later ticks."""
    return MOMENTS * position.tick + (position.stream != Stream.COMPUTE)


class Uses:
    """Which ops take bytes of a memory, and which release some.

    Of the ops of one stream that end a life only the last counts: the stream's order implies the others. An op with a
    workspace always takes and releases device memory.

    Attributes:
        takers: By stream, in the order of ticks.
    """

    def __init__(self, books: Books, memory: str) -> None:
        self.releasers: set[Position] = set()
        taking: set[Position] = set()
        if memory == "device":
            taking = {position for position, op in books.table.positions() if kind_of(op.stream, op.what).workspace}
            self.releasers |= taking
        for life in books.lifetimes:
            if life.memory == memory:
                if life.start is not None:
                    taking.add(life.start)
                self.releasers.update(life.ends)
        self.takers: dict[str, list[Position]] = {}
        for position in sorted(taking):
            self.takers.setdefault(position.stream, []).append(position)


def moved_bytes(effects: Iterable[tuple[Position, Effect]]) -> tuple[int, int]:
    """Bytes copied to the device and to the host."""
    moved = {Stream.H2D: 0, Stream.D2H: 0}
    for position, effect in effects:
        if position.stream in moved:
            moved[position.stream] += effect.moves
    return moved[Stream.H2D], moved[Stream.D2H]


def slab_bytes(workload: Workload, kind: StepKind) -> int:
    """Host bytes through which gradients go to the caller: as many as the largest gradients of a block take.

    There is no slab where gradients wait on the host, and where they are used where they are made.
    """
    if kind.transfer == "bind" or kind.mode == "forward" or kind.holds_gradients:
        return 0
    return max((block.landing_bytes for block in workload.blocks if block.has_backward), default=0)


@dataclass(frozen=True, slots=True)
class Peak:
    """The tick that needs the most device memory, and the parts of this memory.

    Args:
        moment: The first such moment, of two for each tick.
        op: The tick's F or B, or another op of it if there is none.
        parts: Bytes by kind, none of them zero, largest first; they add up to the schedule's `device_bytes`.
    """

    moment: int
    op: Op | None
    parts: tuple[tuple[str, int], ...]

    @property
    def tick(self) -> int:
        """The tick."""
        return self.moment // MOMENTS

    @property
    def is_after(self) -> bool:
        """Whether the tick's op of compute is over then: its workspace is given back."""
        return self.moment % MOMENTS > 0


def alive_at(books: Books, moment: int) -> Iterator[Lifetime]:
    """The lives that take bytes of the device at a moment; of those that share a storage, the first."""
    storages: set[tuple[int, int]] = set()
    for life in books.lifetimes:
        shared = None if life.storage is None else (life.storage, life.item.micro_batch)
        if life.memory == "device" and life.first <= moment <= life.last and shared not in storages:
            yield life
            storages |= set() if shared is None else {shared}


def device_moments(books: Books) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The device bytes that exist at each moment, and those with the workspace of the ops that run then."""
    lives = (life for life in books.lifetimes if life.memory == "device")
    live = live_moments(lives, len(books.table.ticks), books.table.arena_bytes)
    needed = list(live)
    for position, effect in books.ops:
        needed[MOMENTS * position.tick] += effect.workspace
    return live, tuple(needed)


def find_peak(table: Table) -> Peak:
    """Says when a schedule needs `device_bytes`, and for what."""
    books = Books(table)
    _, needed = device_moments(books)
    moment = max(range(len(needed)), key=lambda m: (needed[m], -m))
    peak = Peak(moment, None, ())
    row = table.ticks[peak.tick]
    ops = [] if peak.is_after else [op.key for op in row.values()]
    workspace = sum(books.effects.of(*op).workspace for op in ops)
    is_loss = any(0 < books.effects.of(*op).workspace == books.effects.loss_workspace(*op[1:]) for op in ops)
    parts = {"weights": table.arena_bytes, "loss" if is_loss else "workspace": workspace}
    for life in alive_at(books, moment):
        part = ITEMS[life.item.kind].part
        parts[part] = parts.get(part, 0) + life.nbytes
    ordered = sorted((p for p in parts.items() if p[1] > 0), key=lambda p: -p[1])
    return replace(peak, op=row.compute or row.d2h or row.h2d, parts=tuple(ordered))
