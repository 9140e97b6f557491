"""Simulation: a step on paper, and lower bounds of its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import networkx as nx

from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.dependency import all_waits, dependency_graph
from megatrain.scheduler.effects import streams
from megatrain.scheduler.items import Stream
from megatrain.scheduler.lifetimes.books import Books
from megatrain.scheduler.table import Position, Table, columns
from megatrain.scheduler.timing.costs import Costs, books_durations, op_durations
from megatrain.scheduler.timing.ends import behind, ends
from megatrain.scheduler.timing.shared import Timing, link_bound, shared_timeline


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


def simulate(schedule: Table, costs: Costs) -> Simulation:
    """Runs every op as soon as its stream is free and its dependencies are done.

    Args:
        schedule: The table.
        costs: Rates of a machine, or measured times.

    Raises:
        ScheduleError: If the schedule doesn't know its workload, or the measurement lacks one of its ops.
    """
    timeline = _timeline(schedule, costs)
    total = dict.fromkeys(streams(), 0.0)
    for timing in timeline:
        total[timing.position.stream] += timing.end_s - timing.start_s
    step_s = max((timing.end_s for timing in timeline), default=0.0)
    named = (Stream.H2D, Stream.COMPUTE, Stream.D2H)
    busy = {s: total[s] / step_s if step_s > 0 else 0.0 for s in streams() if s in named or total[s]}
    return Simulation(step_s, busy, max(streams(), key=lambda s: total[s]), timeline)


def _timeline(schedule: Table, costs: Costs) -> tuple[Timing, ...]:
    books = Books(schedule)
    durations, waits = books_durations(books, costs), all_waits(books)
    if isinstance(costs, Hardware) and costs.is_shared:
        return shared_timeline(durations, waits, costs)
    free = dict.fromkeys(streams(), 0.0)
    ends: dict[Position, float] = {}
    timeline: list[Timing] = []
    for position, seconds in durations.items():
        start = max([free[position.stream], *(ends[before] for before in waits[position])])
        free[position.stream] = ends[position] = start + seconds
        timeline.append(Timing(position, start, start + seconds))
    return tuple(timeline)


def critical_path(schedule: Table, costs: Costs) -> tuple[float, tuple[Position, ...]]:
    """Seconds and ops of the longest chain of dependencies, the order of streams included.

    Each op counts as long as it takes in the simulated step. No op waits for anything else, so this is how long the
    step takes, and why.
    """
    if isinstance(costs, Hardware) and costs.is_shared:
        durations = {timing.position: timing.end_s - timing.start_s for timing in _timeline(schedule, costs)}
    else:
        durations = op_durations(schedule, costs)
    return _longest_path(dependency_graph(schedule), durations)


def lower_bounds(schedule: Table, costs: Costs) -> dict[str, float]:
    """Lower bounds of the seconds that these ops take, by reason.

    Per stream the sum of its ops, which run one by one; `"link"` is the time that copies of both directions take
    together, where one slows the other down; `"data"` is the longest chain of ops that need each other's results,
    which no number of slots and no other order shortens; `"ends"` is all of compute with what comes before its first op
    and after its last, in any order, and `"behind"` is all of the host that compute needs, then all of compute that
    needs the last of it, whichever that is, and what comes after: a host may take longer for deferred updates than the
    device for the forward. No op counts as slowed down by others otherwise.
    """
    durations = op_durations(schedule, costs)
    bounds = {str(stream): 0.0 for stream in columns(schedule.ticks)}
    for position, seconds in durations.items():
        bounds[position.stream] += seconds
    if isinstance(costs, Hardware) and costs.is_shared:
        bounds["link"] = link_bound(bounds[Stream.H2D], bounds[Stream.D2H], costs)
    graph = dependency_graph(schedule)
    needed = [(a, b) for a, b, kind in graph.edges(data="kind") if kind in ("data", "weight")]
    data = nx.DiGraph(needed)
    bounds["data"] = _longest_path(data, durations)[0]
    compute = {position for position in durations if position.stream == Stream.COMPUTE}
    if compute:
        head_s, tail_s = ends(data, durations, compute)
        bounds["ends"] = head_s + bounds[Stream.COMPUTE] + tail_s
        bounds["behind"] = behind(data, durations, compute, Stream.HOST) + tail_s
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
