"""Costs: the time of each op on a machine, by its rates or as measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite

from megatrain.counts import counted
from megatrain.errors import OptionError, ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.work import Works
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

    Raises:
        ScheduleError: If a measurement is of another schedule, or the schedule doesn't know its workload.
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
