"""Simulation: a step on paper, lower bounds of its time, and a step as it ran."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, isinf
from typing import NamedTuple

import networkx as nx

from megatrain.counts import counted
from megatrain.errors import ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.costs import Costs, Measured, books_durations, op_durations
from megatrain.scheduler.dependency import dependency_graph, derive_waits, latest_waits
from megatrain.scheduler.effects import streams
from megatrain.scheduler.items import Stream
from megatrain.scheduler.lifetimes import Books
from megatrain.scheduler.table import Position, Table, columns

# Ops that end at the same moment, up to rounding, end together.
_ROUNDING = 1 + 1e-12


@dataclass(frozen=True, slots=True)
class Timing:
    """One op of a simulated step, in seconds from its start."""

    position: Position
    start_s: float
    end_s: float


def speed(hardware: Hardware, stream: str, busy: Collection[str]) -> float:
    """The share of its own rate that a stream keeps while others work.

    Copies one way slow down those the other way. Host memory is one resource of updates, norms and copies: where they
    want more bytes per second than it has, each keeps the same part of what it wants.

    Args:
        hardware: The machine.
        stream: Its name.
        busy: The names of all streams that work.
    """
    if stream == Stream.COMPUTE:
        return hardware.compute_beside if len(busy) > 1 else 1.0
    both = Stream.H2D in busy and Stream.D2H in busy
    own: dict[str, float] = {
        Stream.H2D: hardware.h2d_beside if both else 1.0,
        Stream.D2H: hardware.d2h_beside if both else 1.0,
        Stream.HOST: 1.0,
    }
    if stream not in own:
        return 1.0
    of_memory = zip(own, (*memory_limits(hardware), 1.0), strict=True)
    wanted = sum(own[name] * part for name, part in of_memory if name in busy)
    return own[stream] / max(1.0, wanted)


def shared_timeline(
    durations: Mapping[Position, float], waits: Mapping[Position, Iterable[Position]], hardware: Hardware
) -> tuple[Timing, ...]:
    """Runs every op as soon as its stream is free and its dependencies are done, as fast as the others let it.

    Args:
        durations: Seconds of each op alone, in table order.
        waits: For each op, the ops of other streams that it waits for.
        hardware: The machine, which says how streams slow each other down.
    """
    number = {stream: n for n, stream in enumerate(dict.fromkeys(position.stream for position in durations))}
    queues: list[list[Position]] = [[] for _ in number]
    for position in durations:
        queues[number[position.stream]].append(position)
    needs = [[[(number[w.stream], w.tick) for w in waits[position]] for position in queue] for queue in queues]
    done = [-1] * len(queues)  # by stream, the tick of the last op that is done
    at, begun = [0] * len(queues), [0.0] * len(queues)
    left: dict[int, float] = {}  # of the ops under way: seconds that they take if nothing slows them down
    shares: dict[tuple[int, ...], list[float]] = {}  # by the streams at work
    now, found = 0.0, dict[Position, Timing]()
    while len(found) < len(durations):
        for n, queue in enumerate(queues):
            if n not in left and at[n] < len(queue) and all([done[m] >= tick for m, tick in needs[n][at[n]]]):
                begun[n], left[n] = now, durations[queue[at[n]]]
        # An op that moves nothing doesn't slow others down.
        busy = tuple([n for n, seconds in left.items() if seconds > 0])
        if busy not in shares:
            streams_at_work = [stream for stream, n in number.items() if n in busy]
            shares[busy] = [speed(hardware, stream, streams_at_work) for stream in number]
        share = shares[busy]
        passed = min([seconds / share[n] for n, seconds in left.items()])
        now += passed
        for n, seconds in [*left.items()]:
            if seconds / share[n] <= passed * _ROUNDING:
                position = queues[n][at[n]]
                found[position] = Timing(position, begun[n], now)
                done[n], at[n] = position.tick, at[n] + 1
                del left[n]
            else:
                left[n] = seconds - passed * share[n]
    return tuple(found[position] for position in durations)


def link_bound(h2d_s: float, d2h_s: float, hardware: Hardware) -> float:
    """Seconds of copies that take so long alone: with as much at the same time as makes them end first.

    Each second with both under way does as much as the sum of the shares does alone.
    """
    return max(to_device * h2d_s + to_host * d2h_s for to_device, to_host in link_limits(hardware))


def link_limits(hardware: Hardware) -> tuple[tuple[float, float], ...]:
    """What a second of copies to the device, and one to the host, count of the link's time: the larger sum holds."""
    shares = hardware.h2d_beside, hardware.d2h_beside
    gain = max(0.0, sum(shares) - 1)
    return (1 - gain / shares[0], 1.0), (1.0, 1 - gain / shares[1])


def memory_bound(h2d_s: float, d2h_s: float, host_s: float, hardware: Hardware) -> float:
    """Seconds of host memory: what updates and norms take alone, and the bytes of copies that take so long alone."""
    to_device, to_host = memory_limits(hardware)
    return host_s + to_device * h2d_s + to_host * d2h_s


def memory_limits(hardware: Hardware) -> tuple[float, float]:
    """What a second of copies to the device, and one to the host, count of the time of host memory."""
    rates = hardware.h2d_bytes_per_s, hardware.d2h_bytes_per_s
    # Copies that take no time move nothing that counts.
    moves = hardware.host_moves
    to_device, to_host = (0.0 if isinf(rate) else moves * rate / hardware.host_bytes_per_s for rate in rates)
    return to_device, to_host


# Ends: how long a step must take before the first of some ops, and after the last, in any order of all ops.
#
# `behind` is the same of what another stream does first.


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
    return simulate_books(Books(schedule), costs)


def simulate_books(books: Books, costs: Costs) -> Simulation:
    """The same as `simulate`, of what is known of a table."""
    timeline = _timeline(books, costs)
    total = dict.fromkeys(streams(), 0.0)
    for timing in timeline:
        total[timing.position.stream] += timing.end_s - timing.start_s
    step_s = max((timing.end_s for timing in timeline), default=0.0)
    named = (Stream.H2D, Stream.COMPUTE, Stream.D2H)
    busy = {s: total[s] / step_s if step_s > 0 else 0.0 for s in streams() if s in named or total[s]}
    return Simulation(step_s, busy, max(streams(), key=lambda s: total[s]), timeline)


def _timeline(books: Books, costs: Costs) -> tuple[Timing, ...]:
    durations, waits = books_durations(books, costs), latest_waits(books)
    if isinstance(costs, Hardware) and costs.is_shared:
        return shared_timeline(durations, {op: latest.values() for op, latest in waits.items()}, costs)
    free = dict.fromkeys(streams(), 0.0)
    ends: dict[Position, float] = {}
    timeline: list[Timing] = []
    for position, seconds in durations.items():
        start = max([free[position.stream], *(ends[before] for before in waits[position].values())])
        free[position.stream] = ends[position] = start + seconds
        timeline.append(Timing(position, start, start + seconds))
    return tuple(timeline)


def critical_path(schedule: Table, costs: Costs) -> tuple[float, tuple[Position, ...]]:
    """Seconds and ops of the longest chain of dependencies, the order of streams included.

    Each op counts as long as it takes in the simulated step. No op waits for anything else, so this is how long the
    step takes, and why.
    """
    if isinstance(costs, Hardware) and costs.is_shared:
        durations = {timing.position: timing.end_s - timing.start_s for timing in _timeline(Books(schedule), costs)}
    else:
        durations = op_durations(schedule, costs)
    return _longest_path(dependency_graph(schedule), durations)


def lower_bounds(schedule: Table, costs: Costs) -> dict[str, float]:
    """Lower bounds of the seconds that these ops take, by reason.

    Per stream the sum of its ops, which run one by one; `"link"` is the time that copies of both directions take
    together, where one slows the other down, and `"host memory"` that of the bytes that updates and copies move there;
    `"data"` is the longest chain of ops that need each other's results,
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
        crossing = bounds[Stream.H2D], bounds[Stream.D2H]
        bounds["link"] = link_bound(*crossing, costs)
        bounds["host memory"] = memory_bound(*crossing, bounds[Stream.HOST], costs)
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


@dataclass(frozen=True, slots=True)
class TimedRun:
    """A training step as it ran: when each op began and ended; made by `TrainStep.time`.

    Args:
        schedule: What ran.
        timeline: Every op, in table order, in seconds from the beginning of the first. Ops of one stream follow each
            other.
    """

    schedule: Table
    timeline: tuple[Timing, ...]

    @staticmethod
    def of(schedule: Table, spans: Mapping[Position, tuple[float, float]]) -> TimedRun:
        """One run of a schedule.

        Args:
            schedule: The schedule that ran.
            spans: The beginning and the end of each op, in seconds from any moment.

        Raises:
            ScheduleError: If an op has no times, times have no op, or a time is no number.
        """
        missing = [f"{p.stream}:{op} at tick {p.tick}" for p, op in schedule.positions() if p not in spans]
        if missing or len(spans) != len(schedule.ops):
            what = f"{missing[0]} has no times" if missing else "there are times of ops that the table doesn't have"
            raise ScheduleError(
                f"{what}.\n  A timed run has a beginning and an end for each op of its table, and for no other.\n"
                "  Time a step with step.time(batch)."
            )
        if not all(isfinite(begin) and isfinite(end) for begin, end in spans.values()):
            raise ScheduleError("a time of the run isn't finite.\n  A beginning and an end are seconds.")
        zero = min((begin for begin, _ in spans.values()), default=0.0)
        free: dict[Stream, float] = {}
        timeline: list[Timing] = []
        for position, _ in schedule.positions():
            begin, end = (seconds - zero for seconds in spans[position])
            # Clocks of devices are coarse: an op may seem to begin a microsecond before the end of the one before.
            begin = max(begin, free.get(position.stream, 0.0))
            free[position.stream] = end = max(begin, end)
            timeline.append(Timing(position, begin, end))
        return TimedRun(schedule, tuple(timeline))

    @property
    def step_s(self) -> float:
        """Seconds from the beginning of the first op to the end of the last."""
        return max((timing.end_s for timing in self.timeline), default=0.0)

    def measured(self) -> Measured:
        """The time of each op from when it could have begun, its stream free and its waits over, to its end."""
        waits, free = derive_waits(self.schedule), dict[Stream, float]()
        ends = {timing.position: timing.end_s for timing in self.timeline}
        seconds: dict[Position, float] = {}
        for position, end in ends.items():
            ready = max([free.get(position.stream, 0.0), *(ends[before] for before in waits[position])])
            seconds[position] = max(0.0, end - ready)
            free[position.stream] = end
        return Measured.of(self.schedule, seconds)

    def __str__(self) -> str:
        ops = dict(self.schedule.positions())
        lines = [f"timed run: {counted(len(self.timeline), 'op')}, {self.step_s * 1e3:.3f} ms"]
        for timing in self.timeline:
            place = f"{timing.position.tick:>4}  {timing.position.stream:<7}  {ops[timing.position]!s:<8}"
            lines.append(f"{place}  {timing.start_s * 1e3:>10.3f}  {timing.end_s * 1e3:>10.3f}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<TimedRun: {counted(len(self.timeline), 'op')}, {self.step_s * 1e3:.3f} ms>"
