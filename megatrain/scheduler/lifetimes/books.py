"""Books: what each op of a table does, and from which op to which each item takes memory.

Generic over the table of effects. The accounting and the instructions follow it; the checker counts for itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from megatrain.scheduler.effects import Effects, kind_of
from megatrain.scheduler.items import ITEMS, Effect, Item, Stream
from megatrain.scheduler.lifetimes.lifetime import Lifetime, begin_of
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Position, Table
from megatrain.scheduler.workload import Workload


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
