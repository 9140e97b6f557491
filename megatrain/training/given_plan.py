"""GivenPlan: a plan that a training step takes exactly, or refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

from megatrain.errors import ScheduleError
from megatrain.options import Options
from megatrain.passes.program import Program
from megatrain.planning.saved_plan import SavedPlan
from megatrain.planning.step_programs import StepPrograms
from megatrain.scheduler.from_program import check_buffers, merge_programs
from megatrain.scheduler.printed.workload_diff import workload_lines
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload
from megatrain.sizes import format_bytes


class GivenPlan:
    """Finds out whether a step is the one that was planned.

    Args:
        plan: The plan.
        options: Of the compiled model.
    """

    def __init__(self, plan: SavedPlan, options: Options) -> None:
        self._plan, self._options = plan, options

    def is_of(self, kind: StepKind) -> bool:
        """Tells whether a step of this kind takes the plan; the first of deferred updates has none to run, so no plan.

        Raises:
            ScheduleError: If training has no such step.
        """
        planned = self._plan.schedule.kind
        if kind == planned:
            return True
        if planned.updates == "deferred" and kind == replace(planned, updates="none"):
            return False
        pairs = [(part.name, getattr(planned, part.name), getattr(kind, part.name)) for part in fields(StepKind)]
        raise _refused([f"{name}: {here} -> {there}" for name, here, there in pairs if here != there])

    def taken(
        self, captures: Sequence[StepPrograms], loss_bytes: int, budget: int
    ) -> tuple[int, Sequence[Program], Schedule]:
        """The level of the captures' rewrites, their programs, and the planned schedule, checked.

        Args:
            captures: One per micro-batch.
            loss_bytes: As in `Workload`.
            budget: Bytes of the device for schedules.

        Raises:
            ScheduleError: If the step isn't the one that was planned, or the budget is smaller, with the difference.
        """
        planned, schedule = self._plan.schedule.known_workload(), self._plan.schedule
        if schedule.device_bytes > budget:
            sizes = f"{format_bytes(schedule.device_bytes)} -> {format_bytes(budget)}"
            raise _refused([f"memory of the device: {sizes}"])
        others: list[Workload] = []
        for level, programs in _levels(captures, planned):
            for program in {id(each): each for each in programs}.values() if len(programs) > 1 else ():
                check_buffers(program)
            merged = merge_programs(programs, self._options.masters).workload
            # Whether code reads values matters to ranks alone, and plans saved by an earlier version don't say it.
            found = replace(merged, loss_bytes=loss_bytes, last_reads_values=planned.last_reads_values)
            if found == planned:
                with self._options.memory_for(budget, programs) as left:
                    if schedule.device_bytes > left:
                        sizes = f"{format_bytes(schedule.device_bytes)} -> {format_bytes(left)}"
                        raise _refused([f"memory of the device, without that of recorded kernels: {sizes}"])
                if schedule.results and not self._options.keeps_results:
                    raise _refused(["results of attention that are kept: compiled and recorded kernels return none"])
                schedule.check()
                return level, programs, schedule
            others.append(found)
        nearest = min(others, key=lambda other: len(other.blocks) != len(planned.blocks))
        raise _refused(workload_lines(planned, nearest))


def plan_of(program: Program, schedule: Schedule, options: Options) -> SavedPlan:
    """The choices of a step that was planned here.

    Args:
        program: The blocks.
        schedule: Of the whole step.
        options: Of the compiled model.
    """
    machine = options.hardware
    step_s = None if machine is None else schedule.simulate(machine).step_s
    name = "" if machine is None else machine.name
    return SavedPlan(program.name, options.precision, schedule, options.memory, name, step_s)


def _levels(captures: Sequence[StepPrograms], planned: Workload) -> Iterator[tuple[int, Sequence[Program]]]:
    """The levels whose blocks may be those of the plan; pieces change no state."""
    wanted = sum(block.state_bytes > 0 for block in planned.blocks)
    for level in range(max(each.least for each in captures), 1 + max(each.last for each in captures)):
        plain = captures[0].at(level - level % captures[0].width)
        if level < captures[0].width or sum(map(bool, map(plain.state_bytes, plain.blocks))) == wanted:
            yield level, [each.at(level) for each in captures]


def _refused(differences: Sequence[str]) -> ScheduleError:
    listed = "\n".join(f"    {difference}" for difference in differences)
    return ScheduleError(
        f"the plan that was given isn't one of this step: {differences[0]}.\n"
        f"  A step takes exactly its plan's choices. As planned -> here:\n{listed}\n"
        "  Plan this step, with megatrain.plan and the same model, shapes, device and options, or leave out plan=."
    )
