"""TimedRun: a training step as it ran, with the beginning and the end of each op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from megatrain.counts import counted
from megatrain.errors import ScheduleError
from megatrain.scheduler.dependency import derive_waits
from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Position, Table
from megatrain.scheduler.timing.costs import Measured
from megatrain.scheduler.timing.simulate import Timing


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
