"""Lifetimes: from which op of a table to which each item takes memory, and how much at each moment."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from megatrain.scheduler.effects import Effects, kind_of
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


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One life of an item, between two moments.

    Args:
        item: The item.
        nbytes: Bytes that it takes in its memory.
        start: The op with which its memory is taken; None if it exists, or its memory is taken, when the step begins.
        ends: The item is released when all these ops are done; empty if it outlives the step.
        storage: The storage that it shares with other items of its micro-batch, whose bytes count once.
        is_brought: A transfer makes it: its memory is taken when the op of `start` is over, not when it begins.
    """

    item: Item
    nbytes: int
    start: Position | None
    ends: tuple[Position, ...]
    storage: int | None = None
    is_brought: bool = False

    @property
    def memory(self) -> str | None:
        """Where it lives; see `ItemKind`."""
        return ITEMS[self.item.kind].memory


def begin_of(tick: int, *, is_brought: bool) -> int:
    """The moment from which on memory is taken that an op of compute takes: for itself, or for a transfer."""
    return MOMENTS * tick + is_brought


def end_of(tick: int, stream: Stream) -> int:
    """The last moment of what an op is the last to use; what a transfer used is released by later ticks."""
    return MOMENTS * tick + (stream != Stream.COMPUTE)


def live_moments(lives: Iterable[Lifetime], num_ticks: int, base: int = 0) -> tuple[int, ...]:
    """Bytes that exist at each moment, two for each tick.

    This bounds the memory at run time for any timing, because an op that takes memory waits for the ops of earlier
    ticks that release some (the "memory" edges of the dependency graph). So things that exist at the same time
    pairwise share a moment, and intervals that pairwise meet have a moment in common.

    Args:
        lives: Of one memory.
        num_ticks: Rows of the table.
        base: Bytes that exist all the time.
    """
    change = [0] * (MOMENTS * num_ticks + 1)
    change[0] = base
    shared: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for life in lives:
        start, end = span(life, num_ticks)
        if life.storage is not None:
            shared.setdefault((life.storage, life.item.micro_batch, life.nbytes), []).append((start, end))
        else:
            change[start] += life.nbytes
            change[end + 1] -= life.nbytes
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


def span(life: Lifetime, num_ticks: int) -> tuple[int, int]:
    """First and last moment of a lifetime, both inclusive."""
    start = 0 if life.start is None else begin_of(life.start.tick, is_brought=life.is_brought)
    if not life.ends:
        return start, MOMENTS * num_ticks - 1
    return start, max(start, *[end_of(end.tick, end.stream) for end in life.ends])


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

    Args:
        table: The table.
        workload: What it runs; by default the table's own.

    Attributes:
        table: The table.
        workload: What it runs.
        effects: What its kinds of ops do.
        ops: What each op does, in the order of `Table.positions`.
        lifetimes: Those of all items; see `item_lifetimes`.

    Raises:
        ScheduleError: If no workload is known.
    """

    def __init__(self, table: Table, workload: Workload | None = None) -> None:
        self.table = table if workload is None else replace(table, workload=workload)
        self.workload = self.table.known_workload()
        self.effects = self.table.effects()
        self.ops = [(position, self.effects.of(*op.key)) for position, op in table.positions()]
        self.lifetimes = item_lifetimes(self.effects, self.ops)

    def brought(self) -> Iterator[tuple[Position | None, Position, tuple[Item, ...]]]:
        """What transfers bring to the device: with which op its memory is taken, the transfer, and the items."""
        takers = Takers(position for position, _ in self.ops)
        for position, effect in self.ops:
            items = tuple(item for item in (*effect.makes, *effect.adds) if ITEMS[item.kind].memory == "device")
            if items and position.stream != Stream.COMPUTE:
                yield takers.of(position), position, items


class Takers:
    """The ops with which device memory is taken.

    All of it comes from compute's allocator, where memory that compute releases can be taken at once, in the order of
    the stream. So what a transfer brings to the device takes its memory when the last op of compute of an earlier
    tick is over, and the transfer waits for this op.

    Args:
        positions: Of all ops, in any order.
    """

    def __init__(self, positions: Iterable[Position]) -> None:
        self._ticks = sorted(position.tick for position in positions if position.stream == Stream.COMPUTE)

    def of(self, maker: Position) -> Position | None:
        """The op with which the memory of what an op makes on the device is taken; None for the start of the step."""
        if maker.stream == Stream.COMPUTE:
            return maker
        earlier = bisect_left(self._ticks, maker.tick)
        return Position(self._ticks[earlier - 1], Stream.COMPUTE) if earlier else None


def item_lifetimes(
    effects: Effects, ops: Collection[tuple[Position, Effect]], memory: str | None = None
) -> tuple[Lifetime, ...]:
    """All lifetimes: by micro-batch, then in the order of `ITEMS`, then by number.

    Args:
        effects: Of the step.
        ops: What each op does, in any order.
        memory: As in `ItemKind`: only lifetimes in this memory; None is all.
    """
    kinds = {kind for kind, item in ITEMS.items() if item.memory is not None and memory in (None, item.memory)}
    begin = None, False
    starts: dict[Item, tuple[Position | None, bool]]
    starts = dict.fromkeys((item for item in effects.standing() if item.kind in kinds), begin)
    uses: dict[Item, list[Position]] = {}
    takers = Takers(position for position, _ in ops)
    for position, effect in ops:
        made = [item for item in (*effect.makes, *effect.adds) if item.kind in kinds]
        if made:
            taker = takers.of(position)
            brought = taker, taker is not None and taker != position
            for item in made:
                life = brought if ITEMS[item.kind].memory == "device" else (position, False)
                if item not in starts or _since(life) < _since(starts[item]):
                    starts[item] = life
        for item in effect.reads:
            if item.kind in kinds:
                uses.setdefault(item, []).append(position)
    found: list[Lifetime] = []
    for item in sorted({*starts, *uses}, key=_rank):
        start, is_brought = starts.get(item, begin)
        ends = () if effects.outlives(item) else tuple(sorted(uses.get(item, ())))
        if not ends and start is not None and not effects.outlives(item):
            ends = (start,)  # nobody reads it: it dies with the op that makes it
        storage = effects.shared_storage(item)
        found.append(Lifetime(item, effects.nbytes(item), start, ends, storage, is_brought))
    return tuple(found)


def _since(life: tuple[Position | None, bool]) -> int:
    start, is_brought = life
    return 0 if start is None else begin_of(start.tick, is_brought=is_brought)


_RANKS = {kind: rank for rank, kind in enumerate(ITEMS)}


def _rank(item: Item) -> tuple[int, int, int]:
    return item.micro_batch, _RANKS[item.kind], item.number


class Uses:
    """Which ops take bytes of a memory, and which release some.

    Of the ops of one stream that end a life only the last counts: the stream's order implies the others. An op with a
    workspace always takes and releases device memory.

    Args:
        books: Of the table.
        memory: As in `ItemKind`.

    Attributes:
        takers: By stream, in the order of ticks.
        releasers: All.
    """

    def __init__(self, books: Books, memory: str) -> None:
        self.releasers: set[Position] = set()
        taking: set[Position] = set()
        if memory == "device":
            taking = {position for position, op in books.table.positions() if kind_of(op.stream, op.what).workspace}
            self.releasers |= taking
        for life in books.lifetimes:
            if life.memory == memory:
                taking |= {life.start} if life.start is not None else set()
                self.releasers |= set({end.stream: end for end in life.ends}.values())
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
        start, end = span(life, len(books.table.ticks))
        shared = None if life.storage is None else (life.storage, life.item.micro_batch)
        if life.memory == "device" and start <= moment <= end and shared not in storages:
            yield life
            storages |= set() if shared is None else {shared}


def device_moments(books: Books) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The device bytes that exist at each moment, and those with the workspace of the ops that run then."""
    lives = (life for life in books.lifetimes if life.memory == "device")
    live = live_moments(lives, len(books.table.ticks), books.table.arena_bytes)
    needed = list(live)
    for op, (position, _) in zip(books.table.ops, books.ops, strict=True):
        needed[begin_of(position.tick, is_brought=False)] += books.effects.workspace(*op.key)
    return live, tuple(needed)


def find_peak(table: Table) -> Peak:
    """Says when a schedule needs `device_bytes`, and for what.

    Raises:
        ScheduleError: If the table doesn't know its workload.
    """
    books = Books(table)
    _, needed = device_moments(books)
    moment = max(range(len(needed)), key=lambda m: (needed[m], -m))
    peak = Peak(moment, None, ())
    row = table.ticks[peak.tick]
    ops = [] if peak.is_after else [op.key for op in row.values()]
    workspace = sum(books.effects.workspace(*op) for op in ops)
    is_loss = any(0 < books.effects.workspace(*op) == books.effects.loss_workspace(*op[1:]) for op in ops)
    parts = {"weights": table.arena_bytes, "loss" if is_loss else "workspace": workspace}
    for life in alive_at(books, moment):
        part = ITEMS[life.item.kind].part
        parts[part] = parts.get(part, 0) + life.nbytes
    ordered = sorted((p for p in parts.items() if p[1] > 0), key=lambda p: -p[1])
    return replace(peak, op=row.compute or row.d2h or row.h2d, parts=tuple(ordered))
