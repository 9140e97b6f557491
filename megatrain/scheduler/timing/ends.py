"""Ends: how long a step must take before the first of some ops, and after the last, in any order of all ops.

`behind` is the same of what another stream does first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import networkx as nx

from megatrain.scheduler.table import Position


class Ends(NamedTuple):
    """The parts of a step in which none of some ops can run.

    Attributes:
        head_s: Seconds before any of them can start.
        tail_s: Seconds after any of them that could be the last.
    """

    head_s: float
    tail_s: float


def ends(needed: nx.DiGraph[Position], durations: Mapping[Position, float], ops: Collection[Position]) -> Ends:
    """Finds both ends.

    The first of the ops follows none of them, and so one of those that need no other comes first; the last alike.

    Args:
        needed: Edges from ops to those that need their results.
        durations: Seconds of each op.
        ops: All ops of compute; at least one.
    """
    needed = nx.DiGraph(needed)
    needed.add_nodes_from(durations)
    return Ends(_before_first(needed, durations, ops), _before_first(needed.reverse(), durations, ops))


def behind(
    needed: nx.DiGraph[Position], durations: Mapping[Position, float], ops: Collection[Position], stream: str
) -> float:
    """Seconds that a stream takes for all that `ops` need of it, and then those of them that need the last of it.

    Whichever of the stream's ops is the last, `ops` that need its result come after it, one by one.

    Args:
        needed: Edges from ops to those that need their results.
        durations: Seconds of each op.
        ops: All ops of compute.
        stream: Another stream.
    """
    graph: nx.DiGraph[Position] = nx.DiGraph(needed)
    graph.add_nodes_from(durations)
    after = {p: {*ops} & nx.descendants(graph, p) for p in durations if p.stream == stream}
    last = [_after(graph, durations, position, found) for position, found in after.items() if found]
    if not last:
        return 0.0
    return sum(durations[position] for position, found in after.items() if found) + min(last)


def _after(
    graph: nx.DiGraph[Position], durations: Mapping[Position, float], position: Position, found: set[Position]
) -> float:
    """Seconds of the ops that need another one, with what lies between at least."""
    ways = nx.single_source_dijkstra_path_length(
        graph, position, weight=lambda a, b, _: 0.0 if a == position else durations[a]
    )
    return min(ways[each] for each in found) + sum(durations[each] for each in found)


def _before_first(graph: nx.DiGraph[Position], durations: Mapping[Position, float], ops: Collection[Position]) -> float:
    """The least of the seconds before those ops that none of the others precedes."""
    before = {position: nx.ancestors(graph, position) for position in _without_predecessor(graph, ops)}
    return min(_earliest(graph, durations, position, ancestors) for position, ancestors in before.items())


def _without_predecessor(graph: nx.DiGraph[Position], ops: Collection[Position]) -> list[Position]:
    follows: set[Position] = set()
    for position in nx.topological_sort(graph):
        if position in follows or position in ops:
            follows.update(graph.successors(position))
    return [position for position in ops if position not in follows]


def _earliest(
    graph: nx.DiGraph[Position], durations: Mapping[Position, float], last: Position, ancestors: set[Position]
) -> float:
    """A bound of the moment at which an op can start: by each chain of ops before it, and by each stream.

    A stream does all its ops before `last` one by one, the first of them no earlier than the earliest can start; after
    its last there is at least the shortest way from one of them.
    """
    part = graph.subgraph({*ancestors, last})
    order = list(nx.topological_sort(part))
    starts: dict[Position, float] = {}
    for position in order:
        starts[position] = max((starts[p] + durations[p] for p in part.predecessors(position)), default=0.0)
    left = {last: 0.0}
    for position in reversed(order):
        if position != last:
            left[position] = max(0.0 if p == last else durations[p] + left[p] for p in part.successors(position))
    found = [starts[last]]
    for stream in {position.stream for position in ancestors}:
        own = [position for position in ancestors if position.stream == stream]
        total = sum(durations[position] for position in own)
        found.append(min(starts[p] for p in own) + total + min(left[p] for p in own))
    return max(found)
