"""Simulation: seconds of ops by the rates of a machine or as measured, and a step on paper or as it ran."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite, isinf

from megatrain.base.counts import counted
from megatrain.errors import OptionError, ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.work import Works
from megatrain.scheduler.dependency import derive_waits, latest_waits
from megatrain.scheduler.effects import streams
from megatrain.scheduler.items import Effect, Stream
from megatrain.scheduler.lifetimes import Books
from megatrain.scheduler.table import Position, Table


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds that each op of a schedule took in a run: `TrainStep.measure`, or `TimedRun.measured`.

    Args:
        schedule: What ran.
        seconds: Of every op, in table order, from the moment when its stream was free and its waits were done, so that
            waking up counts, until its end.

    Raises:
        OptionError: If a time is negative or no number.
        ScheduleError: If an op has no time, or a time no op.
    """

    schedule: Table
    seconds: Mapping[Position, float]

    def __post_init__(self) -> None:
        for position, op in self.schedule.positions():
            seconds = self.seconds.get(position)
            if seconds is None:
                raise ScheduleError(
                    f"{position.stream}:{op} at tick {position.tick} has no time.\n"
                    "  A measured run has a time for each op of its table.\n"
                    "  Give a time for each op, also for ops that move nothing."
                )
            if not isfinite(seconds) or seconds < 0:
                raise OptionError(
                    f"{position.stream}:{op} can't take {seconds} s.\n  A time is a number that isn't negative."
                )
        if len(self.seconds) != len(self.schedule.ops):
            extra = min(set(self.seconds).difference(p for p, _ in self.schedule.positions()))
            raise ScheduleError(f"there is a time for {extra.stream} at tick {extra.tick}, where the table has no op.")

    def durations(self, schedule: Table) -> dict[Position, float]:
        """Seconds of each op, in table order.

        Raises:
            ScheduleError: If another schedule was measured.
        """
        if schedule != self.schedule:
            raise ScheduleError(
                "the measurement is of another schedule.\n  What an op takes depends on what runs next to it.\n"
                "  Measure a run of this schedule, or give the rates of the machine: Hardware.measure()."
            )
        return {position: self.seconds[position] for position, _ in schedule.positions()}

    def __str__(self) -> str:
        lines = [f"measured: {counted(len(self.seconds), 'op')}; ms"]
        for position, op in self.schedule.positions():
            milliseconds = self.seconds[position] * 1e3
            lines.append(f"{position.tick:>4}  {position.stream:<7}  {op!s:<8}  {milliseconds:>10.3f}")
        return "\n".join(lines)


Costs = Hardware | Measured


def op_durations(schedule: Table, costs: Costs) -> dict[Position, float]:
    """Seconds of each op, in table order, if nothing else slows it down.

    Of a machine's rates: an op of compute takes as long as its kernels, a copy as long as its bytes, an op of the host
    as long as the bytes that it reads and writes, an update longer by a time for each parameter.
    """
    return costs.durations(schedule) if isinstance(costs, Measured) else books_durations(Books(schedule), costs)


def books_durations(books: Books, costs: Costs) -> dict[Position, float]:
    """The same as `op_durations`, of what is known of a table."""
    if isinstance(costs, Measured):
        return costs.durations(books.table)
    seconds = OpSeconds(costs)
    return {position: seconds.of(position.stream, effect) for position, effect in books.ops}


class OpSeconds:
    """Seconds of ops on a machine if nothing else slows them down; equal kernels are timed once."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._rates: dict[str, float] = {
            Stream.H2D: hardware.h2d_bytes_per_s,
            Stream.D2H: hardware.d2h_bytes_per_s,
            Stream.HOST: hardware.host_bytes_per_s,
            Stream.DISK: hardware.disk_bytes_per_s,
            **hardware.further_rates,
        }
        self._known: dict[tuple[Works, bool], float] = {}

    def of(self, stream: str, effect: Effect) -> float:
        """Seconds of an op: as long as its kernels, or as the bytes that it moves, or reads and writes on the host."""
        computes = bool(effect.work) or stream == Stream.COMPUTE
        seconds = self.of_kernels(effect.work, effect.is_recorded) if computes else self._hardware.launch_s
        if stream == Stream.HOST:
            seconds += self._hardware.op_s + effect.num_parameters * self._hardware.update_s
        return seconds + effect.moves / self._rates.get(stream, inf)

    def of_kernels(self, works: Works, is_recorded: bool = False) -> float:
        """Seconds of an op of compute with these kernels, launched one by one or, as recorded, by one call."""
        key = works, is_recorded
        if key not in self._known:
            self._known[key] = self._hardware.seconds(works, is_recorded=is_recorded)
        return self._known[key]


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
    want more bytes per second than it has, each keeps the same part of what it wants. The stream itself is `busy`, too.
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
    """Runs every op as soon as its stream is free and its waits are over, as fast as the others let it.

    Seconds are of each op alone, in table order.
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


def link_limits(hardware: Hardware) -> tuple[tuple[float, float], ...]:
    """What a second of copies to the device, and one to the host, count of the link's time: the larger sum holds."""
    shares = hardware.h2d_beside, hardware.d2h_beside
    gain = max(0.0, sum(shares) - 1)
    return (1 - gain / shares[0], 1.0), (1.0, 1 - gain / shares[1])


def memory_limits(hardware: Hardware) -> tuple[float, float]:
    """What a second of copies to the device, and one to the host, count of the time of host memory."""
    rates = hardware.h2d_bytes_per_s, hardware.d2h_bytes_per_s
    # Copies that take no time move nothing that counts.
    moves = hardware.host_moves
    to_device, to_host = (0.0 if isinf(rate) else moves * rate / hardware.host_bytes_per_s for rate in rates)
    return to_device, to_host


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
    """As `Schedule.simulate`."""
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
        return Measured(self.schedule, seconds)

    def __str__(self) -> str:
        ops = dict(self.schedule.positions())
        lines = [f"timed run: {counted(len(self.timeline), 'op')}, {self.step_s * 1e3:.3f} ms"]
        for timing in self.timeline:
            place = f"{timing.position.tick:>4}  {timing.position.stream:<7}  {ops[timing.position]!s:<8}"
            lines.append(f"{place}  {timing.start_s * 1e3:>10.3f}  {timing.end_s * 1e3:>10.3f}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<TimedRun: {counted(len(self.timeline), 'op')}, {self.step_s * 1e3:.3f} ms>"
