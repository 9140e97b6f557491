"""Lifetimes: from which op of a table to which each item takes memory, and how much at each moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from megatrain.scheduler.effects import Effects, KnownOp, kind_of, streams
from megatrain.scheduler.items import ITEMS, Effect, Ints, Item, Stream, group_of
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
    groups: dict[tuple[int, int, int], int] = {}
    found = [
        (each.first, each.last, each.nbytes, group_of(groups, each.item, each.nbytes, each.storage)) for each in lives
    ]
    first, last, nbytes, group = np.array(found, np.int64).reshape(-1, 4).T
    return tuple(_live(first, last, nbytes, group, num_ticks, base).tolist())


def _live(first: Ints, last: Ints, nbytes: Ints, group: Ints, num_ticks: int, base: int) -> Ints:
    """As `live_moments`; of those of one group, which share their bytes, the bytes count once."""
    shares = group >= 0
    if shares.any():
        order = np.lexsort((first[shares], group[shares]))
        begin, end, size, of = (column[shares][order] for column in (first, last, nbytes, group))
        # The latest end so far, in which later groups come later.
        apart = of * (MOMENTS * num_ticks + 1)
        latest = np.maximum.accumulate(end + apart)
        is_new = np.append(True, begin[1:] + apart[1:] > latest[:-1] + 1)
        is_last = np.append(is_new[1:], True)
        first = np.append(first[~shares], begin[is_new])
        last = np.append(last[~shares], (latest - apart)[is_last])
        nbytes = np.append(nbytes[~shares], size[is_new])
    change = np.zeros(MOMENTS * num_ticks + 1, np.int64)
    change[0] = base
    np.add.at(change, first, nbytes)
    np.subtract.at(change, last + 1, nbytes)
    return np.cumsum(change[:-1])


def live_bytes(lives: Iterable[Lifetime], num_ticks: int, base: int = 0) -> tuple[int, ...]:
    """Bytes that exist in each tick, at the moment that has more; see `live_moments`."""
    return of_ticks(live_moments(lives, num_ticks, base))


def of_ticks(moments: Sequence[int]) -> tuple[int, ...]:
    """The larger figure of each tick, of figures for each moment."""
    return tuple(map(max, moments[::MOMENTS], moments[1::MOMENTS]))


# Spans: the moments of all items of a table at once, from which its bytes follow.


class OpColumns(NamedTuple):
    """What ops take and use of a memory, as columns.

    Attributes:
        workspace: Of each op.
        takes: The numbers of items in `Effects.items`.
        takers: The index of the op that takes each.
        uses: Likewise, of what ops use.
        users: The index of the op that uses each.
    """

    workspace: Ints
    takes: Ints
    takers: Ints
    uses: Ints
    users: Ints

    @staticmethod
    def of(ops: Sequence[KnownOp]) -> OpColumns:
        """The columns of these ops."""
        takes, takers = _flat([op.takes for op in ops])
        uses, users = _flat([op.uses for op in ops])
        return OpColumns(np.array([op.effect.workspace for op in ops], np.int64), takes, takers, uses, users)

    @staticmethod
    def joined(parts: Sequence[OpColumns]) -> OpColumns:
        """The ops of all parts, one part after the other."""
        parts = [OpColumns.of([]), *parts]
        workspace, takes, takers, uses, users = map(np.concatenate, zip(*parts, strict=True))
        before = np.cumsum([0, *(len(part.workspace) for part in parts)])[:-1]
        takers += np.repeat(before, [len(part.takes) for part in parts])
        users += np.repeat(before, [len(part.uses) for part in parts])
        return OpColumns(workspace, takes, takers, uses, users)


def _flat(numbers: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """All numbers, and the index of the sequence of each."""
    flat = np.array(list(chain.from_iterable(numbers)), np.int64)
    return flat, np.repeat(np.arange(len(numbers)), np.array([len(each) for each in numbers], np.int64))


class Spans:
    """From which moment to which items take memory, by their numbers in `Effects.items`.

    Device memory comes from compute's allocator, where memory that compute releases can be taken at once, in the order
    of the stream. So what a transfer brings to the device takes its memory when the last op of compute of an earlier
    tick is over, and the transfer waits for this op.

    Args:
        effects: The step.
        ops: All ops, in any order.
        ticks: Of each.
        of_streams: The stream of each.
        num_ticks: Of the table.

    Attributes:
        computed: Of each op, the tick of the last op of compute of an earlier tick; -1 if there is none.
        numbers: Of the items that exist at any time.
        first: The first moment of each of these.
        last: The last moment, inclusive.
        starts: `num_streams * tick + rank` of the op with which its memory is taken; -1 if the memory is taken when the
            step begins.
    """

    def __init__(
        self, effects: Effects, ops: OpColumns, ticks: Ints, of_streams: Iterable[Stream], num_ticks: int
    ) -> None:
        self._ops, self._ticks, self._num_ticks = ops, ticks, num_ticks
        self._facts = facts = effects.facts.arrays()
        order = streams()
        places = {stream: place for place, stream in enumerate(order)}
        ranks = np.array([places[stream] for stream in of_streams], np.int64)
        size, compute, end = len(order), order.index(Stream.COMPUTE), MOMENTS * num_ticks - 1
        takes, takers = ops.takes, ops.takers
        is_transfer = ranks != compute
        begins, starts = MOMENTS * ticks, size * ticks + ranks
        computes = np.sort(ticks[~is_transfer])
        self.computed = computed = np.append(-1, computes)[np.searchsorted(computes, ticks)]
        is_brought = is_transfer[takers] & facts.is_on_device[takes]
        begin = np.where(is_brought, np.maximum(MOMENTS * computed + 1, 0)[takers], begins[takers])
        start = np.where(is_brought, np.maximum(size * computed + compute, -1)[takers], starts[takers])
        # The first moment and, of equal ones, the first op.
        scale = size * num_ticks + 1
        never = scale * (end + 2)
        earliest = np.full(len(facts.nbytes), never)
        np.minimum.at(earliest, takes, scale * begin + start + 1)
        earliest[list(effects.standing)] = 0
        last = np.full(len(facts.nbytes), -1)
        np.maximum.at(last, ops.uses, (begins + is_transfer)[ops.users])
        is_used = last >= 0
        self.numbers = numbers = np.flatnonzero(is_used | (earliest < never))
        earliest = earliest[numbers]
        earliest[earliest == never] = 0
        self.first, self.starts = earliest // scale, earliest % scale - 1
        # What nobody reads dies with the op that makes it; if there is none, it stays.
        of_start = MOMENTS * (self.starts // size) + (self.starts % size != compute)
        unused = np.where(self.starts < 0, end, of_start)
        last = np.maximum(self.first, np.where(is_used[numbers], last[numbers], unused))
        self.last = np.where(facts.outlives[numbers], end, last)

    def device_moments(self, base: int) -> tuple[Ints, Ints]:
        """The device bytes that exist at each moment, and those with the workspace of the ops that run then.

        Args:
            base: Bytes that exist all the time.
        """
        there = self._facts.is_on_device[self.numbers]
        numbers = self.numbers[there]
        sizes = self._facts.nbytes[numbers], self._facts.groups[numbers]
        live = _live(self.first[there], self.last[there], *sizes, self._num_ticks, base)
        needed = live.copy()
        np.add.at(needed, MOMENTS * self._ticks, self._ops.workspace)
        return live, needed


# Books: what each op of a table does, and from which op to which each item takes memory.
#
# Generic over the table of effects. The accounting and the instructions follow it; the checker counts for itself.


class Books:
    """The effects of the ops of a table, and the lifetimes that follow.

    Attributes:
        ops: What each op does, in the order of `Table.positions`.
        spans: From when to when items take memory; see `Spans`.
        lifetimes: Those of all items; see `item_lifetimes`.
    """

    def __init__(self, table: Table, workload: Workload | None = None, effects: Effects | None = None) -> None:
        self.table = table if workload is None else replace(table, workload=workload)
        self.workload = self.table.known_workload()
        self.effects = self.table.effects() if effects is None else effects
        known = self.effects.known
        ops = [(position, known(*op.key)) for position, op in table.positions()]
        self.ops = [(position, op.effect) for position, op in ops]
        ticks = np.array([position.tick for position, _ in ops], np.int64)
        columns, of_ops = OpColumns.of([op for _, op in ops]), [position.stream for position, _ in ops]
        self.spans = Spans(self.effects, columns, ticks, of_ops, len(table.ticks))
        self.lifetimes = item_lifetimes(self.effects, ops, self.spans)

    def brought(self) -> Iterator[tuple[Position | None, Position, tuple[Item, ...]]]:
        """What transfers bring to the device: with which op its memory is taken, the transfer, and the items."""
        for tick, (position, effect) in zip(self.spans.computed.tolist(), self.ops, strict=True):
            made = () if position.stream == Stream.COMPUTE else (*effect.makes, *effect.adds)
            items = tuple([item for item in made if ITEMS[item.kind].memory == "device"])
            if items:
                yield None if tick < 0 else Position(tick, Stream.COMPUTE), position, items


def item_lifetimes(effects: Effects, ops: Iterable[tuple[Position, KnownOp]], spans: Spans) -> tuple[Lifetime, ...]:
    """All lifetimes: by micro-batch, then in the order of `ITEMS`, then by number."""
    uses, order, found = _last_uses(ops), streams(), list[Lifetime]()
    columns = zip(*(each.tolist() for each in (spans.numbers, spans.first, spans.last, spans.starts)), strict=True)
    for number, first, last, at in sorted(columns, key=lambda column: effects.ranks[column[0]]):
        item, memory, nbytes, storage, outlives = effects.items[number]
        start = None if at < 0 else Position(at // len(order), order[at % len(order)])
        ends: list[Position] = []
        if not outlives:
            ends = [of_stream[number] for of_stream in uses if number in of_stream]
            if not ends and start is not None:
                ends = [start]  # nobody reads it: it dies with the op that makes it
        is_brought = first % MOMENTS > 0
        found.append(Lifetime(item, memory, nbytes, first, last, start, tuple(ends), storage, is_brought))
    return tuple(found)


def _last_uses(ops: Iterable[tuple[Position, KnownOp]]) -> list[dict[int, Position]]:
    """By stream: the last op that uses each item."""
    uses: dict[Stream, dict[int, Position]] = {}
    for position, op in ops:
        if op.uses:
            of_stream = uses.setdefault(position.stream, {})
            for number in op.uses:
                of_stream[number] = position
    return list(uses.values())


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
    live, needed = books.spans.device_moments(books.table.arena_bytes)
    return tuple(live.tolist()), tuple(needed.tolist())


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
