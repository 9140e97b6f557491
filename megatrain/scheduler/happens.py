"""Happens-before: the ops that are certainly done when an op starts, as one number per stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import networkx as nx

from megatrain.scheduler.effects import streams
from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Position

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
