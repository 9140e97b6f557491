"""Dependencies: a directed graph over the positions of a table, and the waits that remain of it.

Generic over the table of effects. Every edge runs from an earlier tick to a later one, so the graph of any table has
no cycle; whether it says enough is for the checker to prove.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx

from megatrain.scheduler.effects import streams
from megatrain.scheduler.items import ITEMS, Item, Stream
from megatrain.scheduler.lifetimes import Books, Uses
from megatrain.scheduler.table import Op, Position, Table
from megatrain.scheduler.workload import Workload

_Edge = tuple[Position, Position, str]


def dependency_graph(schedule: Table, workload: Workload | None = None) -> nx.DiGraph[Position]:
    """The dependencies of a table that its order respects.

    Nodes are positions with the attribute `op`; edges have the attribute `kind`:

    - `"data"`: an op, and one that reads what it makes;
    - `"weight"`: the same of a block's state, in a slot or in host memory;
    - `"resource"`: the last reader of some bytes, and the next op that overwrites some of them: a `W` a slot, a `U`
      parameters in host memory;
    - `"memory"`: an op that releases, and one that takes memory in a later tick. The accounting of memory
      relies on these: F and B wait for what d2h did in earlier ticks; an `A` that returns waits for the op of compute
      after which the memory that it fills is taken; a `G` waits for each `U` that releases gradients on the host, so it
      never runs far before slow updates;
    - `"stream"`: the next op of the same stream.

    An edge with several reasons has the first of these as its kind.
    """
    return books_graph(Books(schedule, workload))


def books_graph(books: Books) -> nx.DiGraph[Position]:
    """The same as `dependency_graph`, of what is known of a table."""
    graph: nx.DiGraph[Position] = nx.DiGraph()
    for position, op in books.table.positions():
        graph.add_node(position, op=op)
    found = [*_edges(books), *_stream_edges(books.table)]
    for before, after, kind in sorted(found, key=lambda edge: _KINDS.index(edge[2])):
        if not graph.has_edge(before, after):
            graph.add_edge(before, after, kind=kind)
    return graph


def _edges(books: Books) -> Iterator[_Edge]:
    """All dependencies but the order of each stream; some come more than once."""
    yield from _item_edges(books)
    yield from _memory_edges(books, "device")
    yield from _memory_edges(books, "landing")
    yield from ((taker, position, "memory") for taker, position, _ in books.brought() if taker is not None)


def latest_waits(books: Books) -> dict[Position, dict[Stream, Position]]:
    """For each op, in table order, the last op of each other stream that it depends on.

    That implies the earlier ones. It is more than `derive_waits` leaves; a simulated step is the same with both, and
    this takes a fraction of the time.
    """
    found: dict[Position, dict[Stream, Position]] = {position: {} for position, _ in books.ops}
    for before, after, _ in _edges(books):
        stream = before.stream
        if stream != after.stream:
            latest = found[after]
            if stream not in latest or latest[stream].tick < before.tick:
                latest[stream] = before
    return found


_KINDS = ("data", "weight", "resource", "memory", "stream")


def derive_waits(schedule: Table, workload: Workload | None = None) -> dict[Position, tuple[Position, ...]]:
    """For each op, the ops of other streams that it waits for, transitively reduced, in table order.

    The streams' own order and these waits imply every dependency; the runtime enforces nothing else.
    """
    return waited_edges(dependency_graph(schedule, workload))


def weight_bindings(schedule: Table) -> dict[Position, Position]:
    """For each F, B and U of compute, the `W` whose slot it reads: the last of its block in an earlier tick."""
    latest: dict[int, Position] = {}
    found: dict[Position, Position] = {}
    for tick, row in enumerate(schedule.ticks):
        if row.compute is not None and row.compute.block in latest:
            found[Position(tick, Stream.COMPUTE)] = latest[row.compute.block]
        if row.h2d is not None and row.h2d.what == "W":
            latest[row.h2d.block] = Position(tick, Stream.H2D)
    return found


def resident_blocks(schedule: Table) -> tuple[int, ...]:
    """Blocks whose weights stay on the device from their forward to their backward: both read one `W`."""
    loads: dict[tuple[str, int], Position] = {}
    for position, load in weight_bindings(schedule).items():
        op = schedule.ticks[position.tick].compute
        assert op is not None
        loads[op.what, op.block] = load
    return tuple(b for what, b in sorted(loads) if what == "F" and loads["F", b] == loads.get(("B", b)))


@dataclass(slots=True)
class _Version:
    """What some bytes hold: who made it, and the last op of each stream that has read it."""

    makers: list[Position] = field(default_factory=list[Position])
    readers: dict[Stream, Position] = field(default_factory=dict[Stream, Position])


# Part of an arena: bytes of the slots, or an item that has a place of its own.
_Range = tuple[Item | None, int, int]


@dataclass(slots=True)
class _Contents:
    """What all items hold while a table is walked. What a tick does shows in later ones, after `end_tick`."""

    _versions: dict[Item, _Version] = field(default_factory=dict[Item, _Version])
    _lying: dict[Item | None, list[tuple[int, int, _Version]]] = field(default_factory=dict[Any, Any])
    _read: list[tuple[_Version, Position]] = field(default_factory=list[tuple[_Version, Position]])
    _made: dict[Item, _Version] = field(default_factory=dict[Item, _Version])
    _added: list[tuple[Item, Position]] = field(default_factory=list[tuple[Item, Position]])

    def read(self, item: Item, position: Position) -> Sequence[Position]:
        """Notes a reader; returns the ops that made the item."""
        version = self._versions.get(item)
        if version is None:  # there since the step began
            version = self._versions[item] = _Version()
            self._lying.setdefault(item, []).append((0, 1, version))
        self._read.append((version, position))
        return version.makers

    def make(self, item: Item, position: Position, where: _Range) -> Sequence[Position]:
        """Notes a maker; returns who has read what it overwrites. What overlaps only later ones follows them."""
        version = self._made[item] = _Version([position])
        arena, start, stop = where
        lying = self._lying.get(arena)
        if lying is None:
            self._lying[arena] = [(start, stop, version)]
            return ()
        overwritten = [other for low, high, other in lying if low < stop and start < high]
        lying[:] = [(low, high, other) for low, high, other in lying if low >= stop or start >= high]
        lying.append((start, stop, version))
        return [reader for other in overwritten for reader in other.readers.values()]

    def add(self, item: Item, position: Position) -> None:
        """Notes one more maker of a sum."""
        self._added.append((item, position))

    def end_tick(self) -> None:
        """Lets what the tick did show."""
        self._versions.update(self._made)
        for item, position in self._added:
            self._versions.setdefault(item, _Version()).makers.append(position)
        for version, position in self._read:
            version.readers[position.stream] = position
        self._made, self._added, self._read = {}, [], []


def _item_edges(books: Books) -> Iterator[_Edge]:
    """Walks the table: an op reads what earlier ticks made, and overwrites what earlier ticks have read."""
    contents, tick = _Contents(), 0
    leaving = {
        (op.block, op.micro_batch): op.slot for op in books.table.ops if op.stream == Stream.DISK and op.what == "E"
    }
    for (position, effect), op in zip(books.ops, books.table.ops, strict=True):
        if position.tick > tick:
            contents.end_tick()
            tick = position.tick
        for item in effect.reads:
            for maker in contents.read(item, position):
                yield maker, position, ITEMS[item.kind].edge
        for item in effect.makes:
            for reader in contents.make(item, position, _range(books, op, item, leaving)):
                yield reader, position, "resource"
        for item in effect.adds:
            contents.add(item, position)


def _range(books: Books, op: Op, item: Item, leaving: Mapping[tuple[int, int | None], int | None]) -> _Range:
    """Where an op puts an item: weights into the bytes of a slot; anything else has a place of its own.

    Values that go on to a file are in a buffer, also where an `A` brings them: that of their `E`, as `leaving` says.
    """
    if item.kind == "parked":
        slot = leaving.get((op.block, op.micro_batch)) if op.stream == Stream.D2H else op.slot
        return item if slot is None else Item("buffer", slot), 0, 1
    if item.kind != "weights" or op.slot is None or op.slot >= len(books.table.slots):
        return item, 0, 1
    start = books.table.slots[op.slot].offset
    work = books.workload.blocks[op.block]
    behind = work.optimizer_bytes if op.block in books.effects.device_updates else 0
    return None, start, start + books.effects.copied(work.state_bytes + behind)


def _memory_edges(books: Books, memory: str) -> Iterator[_Edge]:
    """An op that takes memory waits, in each other stream, for the last op of earlier ticks that releases some."""
    uses = Uses(books, memory)
    taking = {position for positions in uses.takers.values() for position in positions}
    last: dict[Stream, Position] = {}  # by stream, what released some in earlier ticks
    here: list[Position] = []  # what releases some in this tick
    tick = 0
    for position, _ in books.ops:
        if position.tick > tick:
            last.update((released.stream, released) for released in here)
            tick, here = position.tick, []
        if position in taking:
            for stream, other in last.items():
                if stream != position.stream:
                    yield other, position, "memory"
        if position in uses.releasers:
            here.append(position)


def _stream_edges(table: Table) -> Iterator[_Edge]:
    last: dict[Stream, Position] = {}
    for position, _ in table.positions():
        if position.stream in last:
            yield last[position.stream], position, "stream"
        last[position.stream] = position


_Clock = tuple[int, ...]


class Clocks:
    """The closure of the order of streams and of waits.

    A stream does its ops in order, so all that one op knows of a stream is the last of its ops that is done:
    the closure of n ops takes n short tuples instead of n * n bits.

    Args:
        waits: For each op of the table, in order of ticks, ops of earlier ticks that it waits for.
    """

    def __init__(self, waits: Mapping[Position, Iterable[Position]]) -> None:
        used = {position.stream for position in waits}
        self._column = {stream: column for column, stream in enumerate(s for s in streams() if s in used)}
        self._done: dict[Position, _Clock] = {}
        last: dict[Stream, Position] = {}
        for position, before in waits.items():
            known = (-1,) * len(self._column)
            for other in (*before, *([last[position.stream]] if position.stream in last else ())):
                known = _later(known, self.after(other))
            self._done[position] = known
            last[position.stream] = position

    def after(self, position: Position) -> _Clock:
        """Per stream, the last tick whose op is done when `position` is."""
        known = list(self._done[position])
        known[self._column[position.stream]] = position.tick
        return tuple(known)

    def is_before(self, first: Position, then: Position) -> bool:
        """Tells whether `first` is done when `then` starts."""
        return self._done[then][self._column[first.stream]] >= first.tick


def _later(a: _Clock, b: _Clock) -> _Clock:
    return tuple(map(max, a, b))


def graph_waits(graph: nx.DiGraph[Position]) -> dict[Position, list[Position]]:
    """For each op of a dependency graph, in order of ticks, what it depends on in other streams."""
    columns = streams()
    return {
        node: sorted(before for before in graph.predecessors(node) if before.stream != node.stream)
        for node in sorted(graph.nodes, key=lambda p: (p.tick, columns.index(p.stream)))
    }


def waited_edges(graph: nx.DiGraph[Position]) -> dict[Position, tuple[Position, ...]]:
    """The waits of a dependency graph without those that follow from the others and the order of streams."""
    columns, waits = streams(), graph_waits(graph)
    clocks = Clocks(waits)
    last: dict[Stream, Position] = {}
    reduced: dict[Position, tuple[Position, ...]] = {}
    for position, before in waits.items():
        # Of one stream, the latest op implies the earlier ones.
        latest = sorted(
            {other.stream: other for other in before}.values(), key=lambda p: (p.tick, columns.index(p.stream))
        )
        known = [*latest, *([last[position.stream]] if position.stream in last else ())]
        reduced[position] = tuple(b for b in latest if not any(o != b and clocks.is_before(b, o) for o in known))
        last[position.stream] = position
    return reduced
