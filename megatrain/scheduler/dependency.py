"""Dependencies: a directed graph over the positions of a table, and the waits that remain of it.

Every edge runs from an earlier tick to a later one, so the graph of any table has no cycle; whether it says
enough is for the checker to prove.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import networkx as nx

from megatrain.scheduler.happens import waited_edges
from megatrain.scheduler.op import Stream
from megatrain.scheduler.table import Position, Schedule
from megatrain.scheduler.workload import Workload

_Edge = tuple[Position, Position, str]


def dependency_graph(schedule: Schedule, workload: Workload | None = None) -> nx.DiGraph[Position]:
    """The dependencies of a table, as far as the table respects them.

    Nodes are positions with the attribute `op`; edges have the attribute `kind`:

    - `"data"`: an op, and one that reads its result;
    - `"weight"`: a `W`, and an F or B that reads what it copied;
    - `"resource"`: the last reader of a slot's bytes, and the next `W` that overwrites some of them;
    - `"memory"`: an op that releases, and one that allocates in a later tick. The accounting of memory
      relies on these: F and B wait for what d2h did in earlier ticks, an `A` that returns also for compute;
    - `"stream"`: the next op of the same stream.

    An edge with several reasons has the first of these as its kind.

    Args:
        schedule: The table.
        workload: What it runs; by default the schedule's own.

    Raises:
        ScheduleError: If no workload is known.
    """
    workload = schedule.known_workload() if workload is None else workload
    graph: nx.DiGraph[Position] = nx.DiGraph()
    for position, op in schedule.positions():
        graph.add_node(position, op=op)
    for edges in (
        _data_edges(schedule, workload),
        _weight_edges(schedule),
        _resource_edges(schedule, workload),
        _memory_edges(schedule),
        _stream_edges(schedule),
    ):
        for before, after, kind in edges:
            if not graph.has_edge(before, after):
                graph.add_edge(before, after, kind=kind)
    return graph


def derive_waits(schedule: Schedule, workload: Workload | None = None) -> dict[Position, tuple[Position, ...]]:
    """For each op, the ops of other streams that it waits for, transitively reduced, in table order.

    The streams' own order and these waits imply every dependency; the runtime enforces nothing else.
    """
    return waited_edges(dependency_graph(schedule, workload))


def weight_bindings(schedule: Schedule) -> dict[Position, Position]:
    """For each F and B, the `W` whose slot it reads: the last one of its block in an earlier tick."""
    latest: dict[int, Position] = {}
    found: dict[Position, Position] = {}
    for tick, row in enumerate(schedule.ticks):
        if row.compute is not None and row.compute.block in latest:
            found[Position(tick, Stream.COMPUTE)] = latest[row.compute.block]
        if row.h2d is not None and row.h2d.what == "W":
            latest[row.h2d.block] = Position(tick, Stream.H2D)
    return found


def _stream_edges(schedule: Schedule) -> Iterator[_Edge]:
    last: dict[Stream, Position] = {}
    for position, _ in schedule.positions():
        if position.stream in last:
            yield last[position.stream], position, "stream"
        last[position.stream] = position


def _weight_edges(schedule: Schedule) -> Iterator[_Edge]:
    for reader, load in weight_bindings(schedule).items():
        yield load, reader, "weight"


class _Found:
    """Where the ops of each kind stand, by block, ascending."""

    def __init__(self, schedule: Schedule) -> None:
        self._positions: dict[tuple[Stream, str, int], list[Position]] = {}
        for position, op in schedule.positions():
            self._positions.setdefault((op.stream, op.what, op.block), []).append(position)

    def __call__(self, stream: Stream, what: str, blocks: Iterable[int]) -> list[Position]:
        return [p for block in blocks for p in self._positions.get((stream, what, block), ())]


def _data_edges(schedule: Schedule, workload: Workload) -> Iterator[_Edge]:
    for before, after in _data_pairs(schedule, workload):
        if before.tick < after.tick:
            yield before, after, "data"


def _data_pairs(schedule: Schedule, workload: Workload) -> Iterator[tuple[Position, Position]]:
    at = _Found(schedule)
    parked = replace(schedule, workload=workload).parked()
    for index, value in enumerate(workload.values):
        made = at(Stream.COMPUTE, "F", [] if value.producer is None else [value.producer])
        readers = workload.backward_readers(index)
        backward = at(Stream.COMPUTE, "B", readers)
        yield from _pairs(made, at(Stream.COMPUTE, "F", value.readers))
        yield from _pairs(made, backward)
        if workload.has_value_gradient(index) and value.producer is not None:
            yield from _pairs(backward, at(Stream.COMPUTE, "B", [value.producer]))
    for block, values in parked.items():
        park, restore = at(Stream.D2H, "A", [block]), at(Stream.H2D, "A", [block])
        yield from _pairs(park, restore)
        for index in values:
            producer = workload.values[index].producer
            yield from _pairs(at(Stream.COMPUTE, "F", [] if producer is None else [producer]), park)
            yield from _pairs(restore, at(Stream.COMPUTE, "B", workload.backward_readers(index)))
    for block in workload.backward_blocks():
        yield from _pairs(at(Stream.COMPUTE, "F", [block]), at(Stream.COMPUTE, "B", [block]))
        yield from _pairs(at(Stream.COMPUTE, "B", [block]), at(Stream.D2H, "G", [block]))


def _pairs(before: Sequence[Position], after: Sequence[Position]) -> Iterator[tuple[Position, Position]]:
    return ((a, b) for a in before for b in after)


def _resource_edges(schedule: Schedule, workload: Workload) -> Iterator[_Edge]:
    readers: dict[Position, list[Position]] = {}
    for reader, load in weight_bindings(schedule).items():
        readers.setdefault(load, []).append(reader)
    live: dict[Position, tuple[int, int]] = {}
    for position, op in schedule.positions():
        if op.slot is None or op.slot >= len(schedule.slots):
            continue
        start = schedule.slots[op.slot].offset
        stop = start + (0 if schedule.transfer == "bind" else workload.blocks[op.block].state_bytes)
        for other, (low, high) in list(live.items()):
            if low < stop and start < high:
                # Bytes overwritten later still follow this W in its stream.
                del live[other]
                earlier = [r for r in readers.get(other, ()) if r.tick < position.tick]
                if earlier:
                    yield earlier[-1], position, "resource"
        live[position] = (start, stop)


def _memory_edges(schedule: Schedule) -> Iterator[_Edge]:
    compute: Position | None = None
    d2h: Position | None = None
    for tick, row in enumerate(schedule.ticks):
        if row.compute is not None and d2h is not None:
            yield d2h, Position(tick, Stream.COMPUTE), "memory"
        if row.h2d is not None and row.h2d.what == "A":
            for before in (compute, d2h):
                if before is not None:
                    yield before, Position(tick, Stream.H2D), "memory"
        compute = compute if row.compute is None else Position(tick, Stream.COMPUTE)
        d2h = d2h if row.d2h is None else Position(tick, Stream.D2H)
