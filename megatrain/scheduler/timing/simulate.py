"""Simulation: a step on paper, and lower bounds of its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import networkx as nx

from megatrain.checks import checked
from megatrain.scheduler.dependency import dependency_graph, derive_waits
from megatrain.scheduler.effects import Stream, streams
from megatrain.scheduler.table import Position, Table
from megatrain.scheduler.timing.costs import Costs, op_durations


@dataclass(frozen=True, slots=True)
class Timing:
    """One op of a simulated step, in seconds from its start."""

    position: Position
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated step.

    Args:
        step_s: Seconds until the last op ends.
        busy: Fraction of the step during which each stream works.
        bound: The stream that works longest; the step can't be shorter than that.
        timeline: Every op, in table order.
    """

    step_s: float
    busy: Mapping[Stream, float]
    bound: Stream
    timeline: tuple[Timing, ...]

    def __str__(self) -> str:
        busy = ", ".join(f"{stream} {fraction:.0%}" for stream, fraction in self.busy.items())
        return f"step {self.step_s * 1e3:.3f} ms; busy: {busy}; bound by {self.bound}"


@checked()
def simulate(schedule: Table, costs: Costs) -> Simulation:
    """Runs every op as soon as its stream is free and its dependencies are done.

    Args:
        schedule: The table.
        costs: Rates of a machine, or measured times.

    Raises:
        ScheduleError: If the schedule doesn't know its workload, or the measurement lacks one of its ops.
    """
    durations = op_durations(schedule, costs)
    waits = derive_waits(schedule)
    free = dict.fromkeys(streams(), 0.0)
    total = dict.fromkeys(streams(), 0.0)
    ends: dict[Position, float] = {}
    timeline: list[Timing] = []
    for position, seconds in durations.items():
        start = max([free[position.stream], *(ends[before] for before in waits[position])])
        free[position.stream] = ends[position] = start + seconds
        total[position.stream] += seconds
        timeline.append(Timing(position, start, start + seconds))
    step_s = max(free.values())
    named = (Stream.H2D, Stream.COMPUTE, Stream.D2H)
    busy = {s: total[s] / step_s if step_s > 0 else 0.0 for s in streams() if s in named or total[s]}
    return Simulation(step_s, busy, max(streams(), key=lambda s: total[s]), tuple(timeline))


@checked()
def critical_path(schedule: Table, costs: Costs) -> tuple[float, tuple[Position, ...]]:
    """Seconds and ops of the longest chain of dependencies, the order of streams included.

    No op waits for anything else, so this is how long the simulated step takes, and why.
    """
    return _longest_path(dependency_graph(schedule), op_durations(schedule, costs))


@checked()
def lower_bounds(schedule: Table, costs: Costs) -> dict[str, float]:
    """Lower bounds of the seconds that these ops take, by reason.

    Per stream the sum of its ops, which run one by one; `"data"` is the longest chain of ops that need each
    other's results, which no number of slots and no other order shortens.
    """
    durations = op_durations(schedule, costs)
    bounds = {str(stream): 0.0 for stream in streams()}
    for position, seconds in durations.items():
        bounds[position.stream] += seconds
    graph = dependency_graph(schedule)
    needed = [(a, b) for a, b, kind in graph.edges(data="kind") if kind in ("data", "weight")]
    bounds["data"] = _longest_path(graph.edge_subgraph(needed), durations)[0]
    return {reason: bound for reason, bound in bounds.items() if bound > 0}


def _longest_path(
    graph: nx.DiGraph[Position], durations: Mapping[Position, float]
) -> tuple[float, tuple[Position, ...]]:
    # networkx weighs edges, so each op's duration goes on the edges that leave it; a last node follows all.
    weighted: nx.DiGraph[Position | str] = nx.DiGraph()
    weighted.add_edges_from((a, b, {"s": durations[a]}) for a, b in graph.edges)
    weighted.add_edges_from((a, "end", {"s": durations[a]}) for a in graph.nodes)
    path = tuple(p for p in nx.dag_longest_path(weighted, weight="s") if isinstance(p, Position))
    return sum(durations[p] for p in path), path
