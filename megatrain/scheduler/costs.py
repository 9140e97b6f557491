"""Costs: the time of each op on a machine, by its rates or as measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import median
from typing import NamedTuple

from megatrain.counts import counted
from megatrain.errors import OptionError, ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.work import Works
from megatrain.scheduler.effects import KINDS, kind_of, streams
from megatrain.scheduler.items import Effect, Stream
from megatrain.scheduler.lifetimes import Books
from megatrain.scheduler.table import Op, Position, Table


class TimedKind(NamedTuple):
    """Ops that take the same time: one op of one block and micro-batch, wherever it stands in a table.

    Args:
        stream: Where it runs; an `A` differs by that.
        what: Its letter.
        block: Its block; `NO_BLOCK` for `N`.
        micro_batch: Its micro-batch; 0 where the step has one, or the op serves all.
        mark: What tells it from other ops of its letter, which take another time. `*`: the graph of this F or B is
            retained, so B doesn't recompute. `+`: this U also sums the squares of its gradients, for a norm that is
            reported. `~`: this F keeps its results, so B doesn't compute them
            again. `-`: the block of this W stays on the device, so only the rest moves. `^`: the kernels of this F
            or B are recorded.
    """

    stream: Stream
    what: str
    block: int
    micro_batch: int
    mark: str = ""

    def __str__(self) -> str:
        block = "" if self.block < 0 else str(self.block)
        micro = f".{self.micro_batch}" if kind_of(self.stream, self.what).per_micro_batch else ""
        return f"{self.what}{block}{micro}{self.mark}"


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds that each op took; serves any schedule of the same program whose ops were all seen.

    Slots, micro-batches and updates may differ. An op that was seen of other micro-batches only is taken as the
    median of these. An `A` is taken as long as it took, though which values it moves may depend on `saves`.

    Args:
        num_blocks: Blocks of the program.
        transfer: As in `Schedule`.
        seconds: By kind of op; make it with `of`.
    """

    num_blocks: int
    transfer: str
    seconds: Mapping[TimedKind, float]

    @staticmethod
    def of(schedule: Table, seconds: Mapping[Position, float]) -> Measured:
        """One run of a schedule, timed op by op.

        Args:
            schedule: The schedule that ran.
            seconds: Of every op, from the moment when its stream was free and its waits were done, so that waking up
                counts, until its end. Of a kind that recurs (a `W` in forward and backward), the median counts.

        Raises:
            OptionError: If a time is negative or no number.
            ScheduleError: If an op has no time, or a time no op.
        """
        found: dict[TimedKind, list[float]] = {}
        for position, op, kind in _kinds(schedule):
            if position not in seconds:
                raise ScheduleError(
                    f"{position.stream}:{op} at tick {position.tick} has no time.\n"
                    "  A measured run has a time for each op of its table.\n"
                    "  Give a time for each op, also for ops that move nothing."
                )
            found.setdefault(kind, []).append(seconds[position])
        if len(seconds) != len(schedule.ops):
            extra = min(set(seconds).difference(p for p, _ in schedule.positions()))
            raise ScheduleError(f"there is a time for {extra.stream} at tick {extra.tick}, where the table has no op.")
        return Measured(schedule.num_blocks, schedule.kind.transfer, _medians(found))

    @staticmethod
    def mean(runs: Sequence[Measured]) -> Measured:
        """Several runs as one: of each kind of op the median of the runs that have it.

        Raises:
            ScheduleError: If there are none, or they are of different programs.
        """
        programs = {(run.num_blocks, run.transfer) for run in runs}
        if len(programs) != 1:
            raise ScheduleError(
                f"no mean of {counted(len(runs), 'run')} of {counted(len(programs), 'program')}.\n"
                "  Runs of one program have the same number of blocks and the same `transfer`.\n"
                "  Measure one program at least once."
            )
        found: dict[TimedKind, list[float]] = {}
        for run in runs:
            for kind, seconds in run.seconds.items():
                found.setdefault(kind, []).append(seconds)
        return Measured(runs[0].num_blocks, runs[0].transfer, _medians(found))

    def durations(self, schedule: Table) -> dict[Position, float]:
        """Seconds of each op of a schedule, in table order.

        Raises:
            ScheduleError: If it isn't of the program that was measured, or has an op that never ran.
        """
        if (schedule.num_blocks, schedule.kind.transfer) != (self.num_blocks, self.transfer):
            raise ScheduleError(
                f"the measurement has {counted(self.num_blocks, 'block')} with `{self.transfer}`, this schedule has "
                f"{schedule.num_blocks} with `{schedule.kind.transfer}`.\n"
                "  A measurement fits only schedules of the same program.\n"
                "  Measure a run of this schedule."
            )
        others: dict[TimedKind, list[float]] = {}
        for kind, seconds in self.seconds.items():
            others.setdefault(kind._replace(micro_batch=0), []).append(seconds)
        # Long tables ask for the same median often.
        typical = {kind: median(seconds) for kind, seconds in others.items()}
        found: dict[Position, float] = {}
        for position, op, kind in _kinds(schedule):
            seconds = self.seconds.get(kind, typical.get(kind._replace(micro_batch=0)))
            if seconds is None:
                raise ScheduleError(
                    f"{position.stream}:{op}{kind.mark} at tick {position.tick} was never measured.\n"
                    "  A schedule can be timed if all of its ops were measured. A retained graph (*), results that are "
                    "kept (~), recorded kernels (^), squares for a norm (+) and weights that persist (-) make other "
                    "ops.\n  Measure a run of this schedule, or of one with the same `saves`, `results`, `recorded`, "
                    "`keep` and `persistent`."
                )
            found[position] = seconds
        return found

    def __str__(self) -> str:
        lines = [f"measured: {counted(self.num_blocks, 'block')}, transfer {self.transfer}; ms"]
        for stream in streams():
            kinds = [kind for kind in self.seconds if kind.stream == stream]
            for kind in sorted(kinds, key=lambda k: (list(KINDS).index((stream, k.what)), *k[2:])):
                lines.append(f"  {stream:<7}  {kind!s:<8}  {self.seconds[kind] * 1e3:>10.3f}")
        return "\n".join(lines)


Costs = Hardware | Measured


def _kinds(schedule: Table) -> Iterator[tuple[Position, Op, TimedKind]]:
    chosen = schedule.saves, schedule.results, schedule.persistent, schedule.recorded
    saves, results, persistent, recorded = map(frozenset, chosen)
    for position, op in schedule.positions():
        marks = {
            "*": op.what in "FB" and op.block in saves,
            "~": op.what in "FBA" and op.block in results,
            "^": op.what in "FB" and op.block in recorded,
            "+": op.what == "U" and schedule.kind.reports_norm,
            "-": op.what == "W" and (op.block in persistent or op.block in schedule.device_updates),
        }
        mark = "".join(mark for mark, holds in marks.items() if holds)
        yield position, op, TimedKind(op.stream, op.what, op.block, op.micro_batch or 0, mark)


def _medians(seconds: Mapping[TimedKind, Sequence[float]]) -> dict[TimedKind, float]:
    for kind, times in seconds.items():
        for time in times:
            if not isfinite(time) or time < 0:
                raise OptionError(
                    f"{kind.stream}:{kind} can't take {time} s.\n  A time is a number that isn't negative."
                )
    return {kind: median(times) for kind, times in seconds.items()}


def op_durations(schedule: Table, costs: Costs) -> dict[Position, float]:
    """Seconds of each op, in table order, if nothing else slows it down.

    Of a machine's rates: an op of compute takes as long as its kernels, a copy as long as its bytes, an op of the host
    as long as the bytes that it reads and writes, an update longer by a time for each parameter.

    Raises:
        ScheduleError: If a measurement lacks an op, or the schedule doesn't know its workload.
    """
    return costs.durations(schedule) if isinstance(costs, Measured) else books_durations(Books(schedule), costs)


def books_durations(books: Books, costs: Costs) -> dict[Position, float]:
    """The same as `op_durations`, of what is known of a table."""
    if isinstance(costs, Measured):
        return costs.durations(books.table)
    seconds = OpSeconds(costs)
    return {position: seconds.of(position.stream, effect) for position, effect in books.ops}


class OpSeconds:
    """Seconds of ops on a machine if nothing else slows them down; equal kernels are timed once.

    Args:
        hardware: The machine.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._rates: dict[str, float] = {
            Stream.H2D: hardware.h2d_bytes_per_s,
            Stream.D2H: hardware.d2h_bytes_per_s,
            Stream.HOST: hardware.host_bytes_per_s,
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
