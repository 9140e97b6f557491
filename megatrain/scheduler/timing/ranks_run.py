"""RanksRun: a training step of several ranks as it ran, with the times of all of them on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.counts import counted
from megatrain.scheduler.table import Table
from megatrain.scheduler.timing.shared import Timing


@dataclass(frozen=True, slots=True)
class RanksRun:
    """A training step of several ranks as it ran; `TrainStep.time` makes it, on each rank the same.

    Args:
        schedules: What each rank ran.
        timelines: Of each rank every op, in table order, in seconds from the beginning of the first op of all.
        hosts: The number of each rank's host. Ranks of one host have one clock. The clocks of different hosts are set
            by the end of the step, when all ranks have met.
    """

    schedules: tuple[Table, ...]
    timelines: tuple[tuple[Timing, ...], ...]
    hosts: tuple[int, ...]

    @staticmethod
    def of(
        schedules: Sequence[Table],
        timelines: Sequence[Sequence[Timing]],
        begins_s: Sequence[float],
        met_s: Sequence[float],
        hosts: Sequence[str],
    ) -> RanksRun:
        """Puts all ranks on one clock.

        Args:
            schedules: As in `RanksRun`.
            timelines: Of each rank every op, in table order, in seconds from a beginning of its own.
            begins_s: When that was, in seconds of the clock of its host.
            met_s: When it left the meeting at the end of the step, by the same clock.
            hosts: The name of its host.
        """
        names = list(dict.fromkeys(hosts))
        # All ranks leave the meeting at nearly the same moment, the first of each host earliest.
        met = {name: min(at for at, other in zip(met_s, hosts, strict=True) if other == name) for name in names}
        offsets = [begin - met[name] for begin, name in zip(begins_s, hosts, strict=True)]
        pairs = list(zip(timelines, offsets, strict=True))
        zero = min((offset + t.start_s for timeline, offset in pairs for t in timeline), default=0.0)
        moved = tuple(
            tuple(Timing(t.position, offset + t.start_s - zero, offset + t.end_s - zero) for t in timeline)
            for timeline, offset in pairs
        )
        return RanksRun(tuple(schedules), moved, tuple(map(names.index, hosts)))

    @property
    def step_s(self) -> float:
        """Seconds from the beginning of the first op of any rank to the end of the last."""
        return max((timing.end_s for timeline in self.timelines for timing in timeline), default=0.0)

    @property
    def num_hosts(self) -> int:
        """How many hosts the ranks are on."""
        return len(set(self.hosts))

    @property
    def clocks(self) -> str:
        """How well the clocks of several hosts agree, in words; empty for one host."""
        if self.num_hosts == 1:
            return ""
        return (
            f"the clocks of {counted(self.num_hosts, 'host')} are set by the end of the step: between hosts, times are "
            "off by as much as a message takes"
        )

    def __str__(self) -> str:
        lines = [f"timed run of {counted(len(self.timelines), 'rank')}: {self.step_s * 1e3:.3f} ms"]
        for rank, timeline in enumerate(self.timelines):
            begin = min((timing.start_s for timing in timeline), default=0.0)
            end = max((timing.end_s for timing in timeline), default=0.0)
            number = counted(len(timeline), "op")
            lines.append(f"rank {rank}: {number}, from {begin * 1e3:.3f} to {end * 1e3:.3f} ms")
        return "\n".join([*lines, *([self.clocks] if self.clocks else [])])

    def __repr__(self) -> str:
        return f"<RanksRun: {counted(len(self.timelines), 'rank')}, {self.step_s * 1e3:.3f} ms>"
