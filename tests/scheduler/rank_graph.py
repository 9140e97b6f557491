"""The dependencies of several ranks' tables as one graph, in which a circle is ranks that wait for each other."""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from megatrain.scheduler.dependency import dependency_graph
from megatrain.scheduler.op import Op
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.table import Position


def graph_of_ranks(schedules: Sequence[Schedule]) -> nx.DiGraph[object]:
    """A transfer is one moment of all its sides: its ops on all ranks are one node."""
    graph: nx.DiGraph[object] = nx.DiGraph()
    for rank, schedule in enumerate(schedules):
        ops = dict(schedule.positions())
        gathers = [at for at, op in ops.items() if op.what == "C"]

        def node(
            at: Position,
            rank: int = rank,
            schedule: Schedule = schedule,
            ops: dict[Position, Op] = ops,
            gathers: list[Position] = gathers,
        ) -> object:
            op = ops[at]
            if op.what == "C":
                return "gather", gathers.index(at)
            if op.what in "UV" and schedule.kind.is_shared:
                return rank, op.what, op.block
            pairs = {"R": ("sum", rank - 1, op.block), "P": ("sum", rank, op.block), "G": ("total", op.block)}
            return pairs.get(op.what, (rank, at))

        graph.add_edges_from((node(a), node(b)) for a, b in dependency_graph(schedule).edges)
        graph.add_edges_from((("sum", rank - 1, op.block), node(at)) for at, op in ops.items() if joins(schedule, op))
    named = [node for node in graph if isinstance(node, tuple) and len(node) == 3]
    updates, waits = ([node for node in named if node[1] == what] for what in "UV")
    graph.add_edges_from((update, wait) for update in updates for wait in waits if update[2] == wait[2])
    return graph


def joins(schedule: Schedule, op: Op) -> bool:
    """Whether an op adds to the pieces of the sum of the rank before, as they come."""
    return op.what == schedule.kind.adding_op and op.what in ("P", "G")
