"""RanksRun: a training step of several ranks as it ran, with the times of all of them on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.counts import counted
from megatrain.scheduler.timing.shared import Timing

if TYPE_CHECKING:
    from megatrain.scheduler.timing.timed_run import TimedRun


@dataclass(frozen=True, slots=True)
class RanksRun:
    """A training step of several ranks as it ran; `TrainStep.time` makes it, on each rank the same.

    Args:
        runs: Of each rank.
        begins_s: When the first op of each rank began, in seconds from the first of all.
        hosts: The number of each rank's host. Ranks of one host have one clock. The clocks of different hosts are set
            by the end of the step, when all ranks have met.
    """

    runs: tuple[TimedRun, ...]
    begins_s: tuple[float, ...]
    hosts: tuple[int, ...]

    @staticmethod
    def of(runs: Sequence[TimedRun], begins_s: Sequence[float], met_s: Sequence[float], hosts: Sequence[str]) -> RanksRun:
        """Puts all ranks on one clock.

        Args:
            runs: Of each rank.
            begins_s: When its first op began, in seconds of the clock of its host.
            met_s: When it left the meeting at the end of the step, by the same clock.
            hosts: The name of its host.
        """
        names = list(dict.fromkeys(hosts))
        # All ranks leave the meeting at nearly the same moment, the first of each host earliest.
        met = {name: min(at for at, other in zip(met_s, hosts, strict=True) if other == name) for name in names}
        begins = [begin - met[name] for begin, name in zip(begins_s, hosts, strict=True)]
        zero = min(begins)
        return RanksRun(tuple(runs), tuple(begin - zero for begin in begins), tuple(map(names.index, hosts)))

    @property
    def timelines(self) -> tuple[tuple[Timing, ...], ...]:
        """Of each rank every op, in table order, in seconds from the beginning of the first op of all."""
        return tuple(
            tuple(Timing(t.position, begin + t.start_s, begin + t.end_s) for t in run.timeline)
            for run, begin in zip(self.runs, self.begins_s, strict=True)
        )

    @property
    def step_s(self) -> float:
        """Seconds from the beginning of the first op of any rank to the end of the last."""
        return max((begin + run.step_s for run, begin in zip(self.runs, self.begins_s, strict=True)), default=0.0)

    @property
    def clocks(self) -> str:
        """How well the clocks of several hosts agree, in words; empty for one host."""
        number = len(set(self.hosts))
        if number == 1:
            return ""
        return (
            f"the clocks of {counted(number, 'host')} are set by the end of the step: between hosts, times are off by as "
            "much as a message takes"
        )

    def __str__(self) -> str:
        lines = [f"timed run of {counted(len(self.runs), 'rank')}: {self.step_s * 1e3:.3f} ms"]
        for rank, (run, begin) in enumerate(zip(self.runs, self.begins_s, strict=True)):
            lines.append(f"rank {rank}, from {begin * 1e3:.3f} ms: {run!r}")
        return "\n".join([*lines, *([self.clocks] if self.clocks else [])])

    def __repr__(self) -> str:
        return f"<RanksRun: {counted(len(self.runs), 'rank')}, {self.step_s * 1e3:.3f} ms>"
