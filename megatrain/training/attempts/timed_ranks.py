"""run_clock() and timed_run(): the times of a step, with those of all ranks where several train together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatrain.device import Device
from megatrain.ranks.host import host_name
from megatrain.runtime.streams.stopwatch import RunClock
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.timing.ranks_run import RanksRun
from megatrain.scheduler.timing.shared import Timing
from megatrain.scheduler.timing.timed_run import TimedRun
from megatrain.training.attempts.together import Together


def run_clock(together: Together, device: Device) -> RunClock:
    """Takes the times of a step; the other ranks hear if there is none.

    Raises:
        ExecuteError: If the device's events don't measure time.
    """
    with together.refusing():
        return RunClock(device)


def timed_run(together: Together, schedule: Schedule, clock: RunClock) -> TimedRun:
    """The times of the step that has just ended; all ranks call it at the same time.

    Args:
        together: The ranks of this process; they have just met to add up their losses.
        schedule: What ran.
        clock: Has taken the times.

    Raises:
        RanksError: If another rank fails meanwhile.
    """
    met_s = time.perf_counter()
    spans = clock.spans()
    run = TimedRun.of(schedule, spans)
    told: dict[str, Any] = {
        "schedule": schedule.to_json(),
        "times": [[timing.start_s, timing.end_s] for timing in run.timeline],
        "begin": clock.zero_s + min((begin for begin, _ in spans.values()), default=0.0),
        "met": met_s,
        "host": host_name(),
    }
    words = together.tell_all("step.time()", told)
    if words is None:
        return run
    schedules = [Schedule.from_json(word["schedule"]) for word in words]
    timelines = [_timeline(table, word["times"]) for table, word in zip(schedules, words, strict=True)]
    begins, met, hosts = ([word[name] for word in words] for name in ("begin", "met", "host"))
    return replace(run, ranks=RanksRun.of(schedules, timelines, begins, met, hosts))


def _timeline(schedule: Schedule, times: Sequence[tuple[float, float]]) -> list[Timing]:
    """The ops of a rank, as it told."""
    pairs = zip(schedule.positions(), times, strict=True)
    return [Timing(position, begin, end) for (position, _), (begin, end) in pairs]
