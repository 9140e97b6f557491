"""timed_run(): the times of a step, with those of all ranks where several train together."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from megatrain.ranks.host import host_name
from megatrain.runtime.streams.stopwatch import RunClock
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.timing.ranks_run import RanksRun
from megatrain.scheduler.timing.timed_run import TimedRun
from megatrain.training.attempts.together import Together


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
    begin_s = clock.zero_s + min((begin for begin, _ in spans.values()), default=0.0)
    told: dict[str, Any] = {
        "schedule": schedule.to_json(),
        "spans": [list(spans[position]) for position, _ in schedule.positions()],
        "begin": begin_s,
        "met": met_s,
        "host": host_name(),
    }
    words = together.tell_all("step.time()", told)
    if words is None:
        return run
    runs = [_run_of(word) for word in words]
    met, begins = [word["met"] for word in words], [word["begin"] for word in words]
    return replace(run, ranks=RanksRun.of(runs, begins, met, [word["host"] for word in words]))


def _run_of(word: dict[str, Any]) -> TimedRun:
    """The run of a rank, as it told."""
    schedule = Schedule.from_json(word["schedule"])
    positions = (position for position, _ in schedule.positions())
    return TimedRun.of(schedule, {p: (begin, end) for p, (begin, end) in zip(positions, word["spans"], strict=True)})
