"""why(): the ops that an op of a schedule waits for, back to the start of the step."""

from __future__ import annotations

import networkx as nx

from megatrain.errors import ScheduleError
from megatrain.scheduler.dependency import dependency_graph
from megatrain.scheduler.op import Op
from megatrain.scheduler.table import Position, Table

# What each kind of dependency means, with the earlier op in the place of the braces.
_REASONS = {
    "data": "needs what {} makes",
    "weight": "needs the weights that {} brings",
    "resource": "writes where {} still reads",
    "memory": "takes memory that {} releases",
    "stream": "comes after {} in its stream",
}


def why(schedule: Table, op: str, tick: int | None = None) -> str:
    """Lists the ops that an op waits for, latest first, then those that the latest waits for, back to the start.

    Args:
        schedule: The table, which knows its workload.
        op: The op as the table prints it, without a star: `"B3"`, `"W3@1"`, `"A1.0"`.
        tick: Its tick, if the op occurs several times; None takes the first.

    Raises:
        ScheduleError: If there is no such op (at that tick).
    """
    graph, ops = dependency_graph(schedule), dict(schedule.positions())
    lines: list[str] = []
    position: Position | None = _found(ops, op, tick)
    while position is not None:
        before = _latest_first(graph, position)
        reasons = [_REASONS[graph.edges[p, position]["kind"]].format(_name(p, ops)) for p in before]
        lines += [_name(position, ops), *(f"  {reason}" for reason in reasons or ["waits for nothing"])]
        position = before[0] if before else None
    return "\n".join(lines)


def _found(ops: dict[Position, Op], name: str, tick: int | None) -> Position:
    found = [position for position, op in ops.items() if str(op) == name]
    at = [position for position in found if tick in (None, position.tick)]
    if not at:
        where = f" at tick {tick}" if found else ""
        others = f"It is at ticks {', '.join(str(p.tick) for p in found)}." if found else "Look at print(schedule)."
        raise ScheduleError(
            f"the schedule has no op `{name}`{where}.\n  An op is named as the table prints it, without a star.\n"
            f"  {others}"
        )
    return at[0]


def _latest_first(graph: nx.DiGraph[Position], position: Position) -> list[Position]:
    """The last op of each stream that it depends on; earlier ones follow from these."""
    latest = {before.stream: before for before in sorted(graph.predecessors(position))}
    return sorted(latest.values(), key=lambda p: (-p.tick, p.stream))


def _name(position: Position, ops: dict[Position, Op]) -> str:
    return f"{ops[position]} ({position.stream}, tick {position.tick})"
