"""gantt(): a simulated step as text, a row per stream and a character per slice of time."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.scheduler.effects import streams
from megatrain.scheduler.table import Position, Table
from megatrain.scheduler.timing.costs import Costs
from megatrain.scheduler.timing.shared import Timing
from megatrain.scheduler.timing.simulate import critical_path, simulate


def gantt(schedule: Table, costs: Costs, *, width: int = 100) -> str:
    """Draws the streams of a simulated step: the letter of the op that takes most of each slice, `.` where none runs.

    Capitals are ops of the critical path: the longest chain of dependencies, which is why the step takes that long.

    Args:
        schedule: The table, which knows its workload.
        costs: Rates of a machine, or measured times.
        width: Slices into which the step is cut.

    Raises:
        ScheduleError: If the schedule doesn't know its workload, or the measurement lacks one of its ops.
    """
    simulation, (_, path) = simulate(schedule, costs), critical_path(schedule, costs)
    letters = {position: op.what for position, op in schedule.positions()}
    drawn = {p: letter if p in set(path) else letter.lower() for p, letter in letters.items()}
    slice_s = simulation.step_s / width
    lines = [f"{simulation}; {slice_s * 1e3:.3g} ms a character"]
    names = max(map(len, streams()))
    for stream in streams():
        timings = [timing for timing in simulation.timeline if timing.position.stream == stream]
        if timings:
            lines.append(f"{stream:{names}}  {_row(timings, drawn, slice_s, width)}")
    return "\n".join(lines)


def _row(timings: Sequence[Timing], drawn: dict[Position, str], slice_s: float, width: int) -> str:
    """Ops of one stream follow each other, so one pass over both finds the longest in each slice."""
    cells = ["."] * width
    longest = [0.0] * width
    for timing in timings if slice_s > 0 else ():
        first = min(width - 1, int(timing.start_s / slice_s))
        last = min(width - 1, int(timing.end_s / slice_s))
        for cell in range(first, last + 1):
            inside = min(timing.end_s, (cell + 1) * slice_s) - max(timing.start_s, cell * slice_s)
            if inside > longest[cell]:
                cells[cell], longest[cell] = drawn[timing.position], inside
    return "".join(cells)
