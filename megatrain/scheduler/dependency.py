"""Dependencies: a directed graph over the positions of a table, and the waits that remain of it.

Every edge runs from an earlier tick to a later one, so the graph of any table has no cycle; whether it says
enough is for the checker to prove.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import networkx as nx

from megatrain.scheduler.happens import waited_edges
from megatrain.scheduler.op import NO_BLOCK, Stream
from megatrain.scheduler.table import Position, Table
from megatrain.scheduler.waiting import last_updates
from megatrain.scheduler.workload import Workload

_Edge = tuple[Position, Position, str]


def dependency_graph(schedule: Table, workload: Workload | None = None) -> nx.DiGraph[Position]:
    """The dependencies of a table, as far as the table respects them.

    Nodes are positions with the attribute `op`; edges have the attribute `kind`:

    - `"data"`: an op, and one that reads its result;
    - `"weight"`: a `W`, and an F or B that reads what it copied; with deferred updates also a `U`, and a `W`
      that copies what it wrote;
    - `"resource"`: the last reader of a slot's bytes, and the next `W` that overwrites some of them; what reads
      parameters in host memory, and a `U` that writes them;
    - `"memory"`: an op that releases, and one that allocates in a later tick. The accounting of memory
      relies on these: F and B wait for what d2h did in earlier ticks, an `A` that returns also for compute; a `G`
      waits for each `U` that releases gradients on the host, so it never runs far ahead of slow updates;
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
        _host_edges(schedule, workload),
        _weight_edges(schedule),
        _resource_edges(schedule, workload),
        _memory_edges(schedule),
        _waiting_edges(schedule, workload),
        _stream_edges(schedule),
    ):
        for before, after, kind in edges:
            if not graph.has_edge(before, after):
                graph.add_edge(before, after, kind=kind)
    return graph


def derive_waits(schedule: Table, workload: Workload | None = None) -> dict[Position, tuple[Position, ...]]:
    """For each op, the ops of other streams that it waits for, transitively reduced, in table order.

    The streams' own order and these waits imply every dependency; the runtime enforces nothing else.
    """
    return waited_edges(dependency_graph(schedule, workload))


def weight_bindings(schedule: Table) -> dict[Position, Position]:
    """For each F and B, the `W` whose slot it reads: the last one of its block in an earlier tick."""
    latest: dict[int, Position] = {}
    found: dict[Position, Position] = {}
    for tick, row in enumerate(schedule.ticks):
        if row.compute is not None and row.compute.block in latest:
            found[Position(tick, Stream.COMPUTE)] = latest[row.compute.block]
        if row.h2d is not None and row.h2d.what == "W":
            latest[row.h2d.block] = Position(tick, Stream.H2D)
    return found


def _stream_edges(schedule: Table) -> Iterator[_Edge]:
    last: dict[Stream, Position] = {}
    for position, _ in schedule.positions():
        if position.stream in last:
            yield last[position.stream], position, "stream"
        last[position.stream] = position


def _weight_edges(schedule: Table) -> Iterator[_Edge]:
    for reader, load in weight_bindings(schedule).items():
        yield load, reader, "weight"


class _Found:
    """Where the ops of each kind stand, by block and micro-batch, ascending."""

    def __init__(self, schedule: Table) -> None:
        self._positions: dict[tuple[Stream, str, int, int], list[Position]] = {}
        for position, op in schedule.positions():
            self._positions.setdefault((op.stream, op.what, op.block, op.micro_batch or 0), []).append(position)

    def __call__(self, stream: Stream, what: str, blocks: Iterable[int], micro_batch: int = 0) -> list[Position]:
        return [p for block in blocks for p in self._positions.get((stream, what, block, micro_batch), ())]


def _data_edges(schedule: Table, workload: Workload) -> Iterator[_Edge]:
    yield from _later(_data_pairs(schedule, workload), "data")


def _data_pairs(schedule: Table, workload: Workload) -> Iterator[tuple[Position, Position]]:
    at = _Found(schedule)
    parked = replace(schedule, workload=workload).parked()
    for number in range(schedule.kind.micro_batches):
        yield from _value_pairs(at, workload, parked, number)
        for block in workload.backward_blocks():
            backward = at(Stream.COMPUTE, "B", [block], number)
            yield from _pairs(at(Stream.COMPUTE, "F", [block], number), backward)
            yield from _pairs(backward, at(Stream.D2H, "G", [block]))


def _value_pairs(
    at: _Found, workload: Workload, parked: Mapping[int, Sequence[int]], number: int
) -> Iterator[tuple[Position, Position]]:
    """What the values of one micro-batch make wait for each other."""
    for index, value in enumerate(workload.values):
        made = at(Stream.COMPUTE, "F", [] if value.producer is None else [value.producer], number)
        readers = workload.backward_readers(index)
        backward = at(Stream.COMPUTE, "B", readers, number)
        yield from _pairs(made, at(Stream.COMPUTE, "F", value.readers, number))
        yield from _pairs(made, backward)
        if workload.has_value_gradient(index) and value.producer is not None:
            yield from _pairs(backward, at(Stream.COMPUTE, "B", [value.producer], number))
    for block, values in parked.items():
        park, restore = at(Stream.D2H, "A", [block], number), at(Stream.H2D, "A", [block], number)
        yield from _pairs(park, restore)
        for index in values:
            producer = workload.values[index].producer
            yield from _pairs(at(Stream.COMPUTE, "F", [] if producer is None else [producer], number), park)
            yield from _pairs(restore, at(Stream.COMPUTE, "B", workload.backward_readers(index), number))


def _host_edges(schedule: Table, workload: Workload) -> Iterator[_Edge]:
    """Gradients before their norm and their updates, and updates of the step before ahead of this one's weights."""
    at = _Found(schedule)
    everything = at(Stream.D2H, "G", range(len(workload.blocks)))
    norms = at(Stream.HOST, "N", [NO_BLOCK])
    yield from _later(_pairs(everything, norms), "data")
    for block in workload.update_blocks():
        group = workload.update_group(block)
        updates = at(Stream.HOST, "U", [block])
        readers = at(Stream.H2D, "W", group)
        if schedule.kind.updates == "deferred":
            yield from _later(_pairs(updates, readers), "weight")
            continue
        if schedule.kind.transfer == "bind":
            readers = [
                p
                for number in range(schedule.kind.micro_batches)
                for w in "FB"
                for p in at(Stream.COMPUTE, w, group, number)
            ]
        # Of one stream, the last op stands for all.
        last = [max(everything)] if everything and schedule.kind.updates == "serial" else []
        yield from _later(_pairs([*at(Stream.D2H, "G", group), *last], updates), "data")
        yield from _later(_pairs(readers, updates), "resource")


def _later(pairs: Iterable[tuple[Position, Position]], kind: str) -> Iterator[_Edge]:
    """The pairs that the table respects, as edges."""
    return ((before, after, kind) for before, after in pairs if before.tick < after.tick)


def _pairs(before: Sequence[Position], after: Sequence[Position]) -> Iterator[tuple[Position, Position]]:
    return ((a, b) for a in before for b in after)


def _resource_edges(schedule: Table, workload: Workload) -> Iterator[_Edge]:
    readers: dict[Position, list[Position]] = {}
    for reader, load in weight_bindings(schedule).items():
        readers.setdefault(load, []).append(reader)
    live: dict[Position, tuple[int, int]] = {}
    for position, op in schedule.positions():
        if op.slot is None or op.slot >= len(schedule.slots):
            continue
        start = schedule.slots[op.slot].offset
        stop = start + (0 if schedule.kind.transfer == "bind" else workload.blocks[op.block].state_bytes)
        for other, (low, high) in list(live.items()):
            if low < stop and start < high:
                # Bytes overwritten later still follow this W in its stream.
                del live[other]
                earlier = [r for r in readers.get(other, ()) if r.tick < position.tick]
                if earlier:
                    yield earlier[-1], position, "resource"
        live[position] = (start, stop)


def _memory_edges(schedule: Table) -> Iterator[_Edge]:
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


def _waiting_edges(schedule: Table, workload: Workload) -> Iterator[_Edge]:
    update = {op.block: p.tick for p, op in schedule.positions() if op.what == "U"}
    released = set(last_updates(workload, update).values()) if update else set[int]()
    last: Position | None = None
    for tick, row in enumerate(schedule.ticks):
        if row.d2h is not None and row.d2h.what == "G" and last is not None:
            yield last, Position(tick, Stream.D2H), "memory"
        last = Position(tick, Stream.HOST) if tick in released else last
