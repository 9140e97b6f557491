"""StepTables: the schedules of whole steps, one per set of captures, and an executor for each order of these."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from megatrain.errors import ExecuteError, ScheduleError, TooSmallError
from megatrain.hardware.machine import usual_machine
from megatrain.memory.device_budget import DeviceBudget
from megatrain.options import Options
from megatrain.passes.program import Program
from megatrain.planning.fitting_blocks import first_that_fits, with_true_hint
from megatrain.planning.saved_plan import AnyPlan, SavedPlan, saved_plan
from megatrain.planning.step_programs import StepPrograms
from megatrain.progress import stage
from megatrain.runtime.engine import Engine
from megatrain.runtime.exchange import Exchange
from megatrain.runtime.executor import Executor
from megatrain.runtime.gradients.landing import LandingArena
from megatrain.scheduler.explain import workload_lines
from megatrain.scheduler.from_program import check_buffers, merge_programs, step_schedule
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


_Plan = Callable[[Sequence[Program]], Schedule]
# Steps may differ in sizes and numbers of micro-batches: the schedules used last are kept.
_MOST = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """A schedule, which serves its programs in any order, and the executors of the orders used last.

    Args:
        captures: What they are programs of.
        programs: In the order in which their workloads were merged.
        schedule: Of a step with these.
        budget: The bound of device memory for which it was made.
        executors: By the order of the programs.
    """

    captures: Sequence[StepPrograms]
    programs: Sequence[Program]
    schedule: Schedule
    budget: int
    executors: OrderedDict[tuple[int, ...], Executor] = field(default_factory=OrderedDict[tuple[int, ...], Executor])

    def programs_of(self, captures: Sequence[StepPrograms]) -> Sequence[Program]:
        """Returns the programs of captures of this table, in their order."""
        known = dict(zip(map(id, self.captures), self.programs, strict=True))
        return [known[id(capture)] for capture in captures]


class StepTables:
    """Makes schedules of whole steps, and keeps them.

    Args:
        options: The options of `compile`.
        budget: The bound of the device memory that schedules take.
        plan: A plan whose schedule all steps take, or None.
        exchange: Who else takes the steps; its ops go into their schedules.
    """

    def __init__(
        self,
        options: Options,
        budget: DeviceBudget,
        plan: AnyPlan | None = None,
        exchange: Exchange | None = None,
    ):
        self._exchange = Exchange() if exchange is None else exchange
        self._options = options
        self._budget = budget
        self._given = None if plan is None else GivenPlan(saved_plan(plan), options)
        self._arena: LandingArena | None = None
        self._tables: OrderedDict[tuple[frozenset[int], StepKind], _Table] = OrderedDict()

    @property
    def is_planned(self) -> bool:
        """Whether a plan was given."""
        return self._given is not None

    def kind(self, micro_batches: int, updates: str, *, clip: bool, reports_norm: bool) -> StepKind:
        """Returns the kind of a training step of the compiled model."""
        return StepKind(
            transfer=self._options.transfer,
            micro_batches=micro_batches,
            updates=updates,
            clip=clip,
            outputs="release",
            reports_norm=reports_norm,
        )

    def schedule(
        self, captures: Sequence[StepPrograms], kind: StepKind, loss_bytes: Callable[[], int]
    ) -> tuple[Sequence[Program], Schedule]:
        """Plans a step, with as little rewritten as fits.

        Args:
            captures: One per micro-batch.
            kind: The kind of the step.
            loss_bytes: Measures the loss; called once for these captures.

        Returns:
            The program of each capture, and the checked schedule of a step with these.

        Raises:
            ScheduleError: If the memory is too small, or the micro-batches can't share blocks.
            ExecuteError: If there is nothing to train.
        """
        key = self._key(captures, kind)
        if not self._is_known(key):
            nbytes = self._loss_bytes(key[0], loss_bytes)
            if self._given is not None and self._given.is_of(kind):
                level, programs, planned = self._given.taken(captures, nbytes, self._budget.nbytes)
            else:
                plan = partial(self._planned, kind=kind, loss_bytes=nbytes)
                with stage("planning"):
                    level, programs, planned = self._fitting(captures, plan, kind)
            for capture in captures:
                capture.least = level
            self._tables[key] = _Table(tuple(captures), programs, planned, self._budget.nbytes)
            while len(self._tables) > _MOST:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return self._tables[key].programs_of(captures), self._tables[key].schedule

    def _is_known(self, key: tuple[frozenset[int], StepKind]) -> bool:
        """Tells whether there is a schedule for the present budget, which may have been lowered, or restored."""
        return key in self._tables and self._tables[key].budget == self._budget.nbytes

    def has_executor(self, captures: Sequence[StepPrograms], kind: StepKind) -> bool:
        """Tells whether `executor` was called for these, in any order."""
        known = self._tables.get(self._key(captures, kind))
        return known is not None and bool(known.executors)

    def executor(self, captures: Sequence[StepPrograms], kind: StepKind, engine: Engine) -> Executor:
        """Returns the executor of a known schedule; the first one moves the model into the engine's store."""
        known, order = self._tables[self._key(captures, kind)], tuple(map(id, captures))
        if order not in known.executors:
            programs = known.programs_of(captures)
            if self._arena is None:
                self._arena = self._exchange.landing(engine.bus)
                engine.gradients.clear()  # gradients land there from now on
            made = Executor(programs, known.schedule, engine, arena=self._arena, merged=known.programs)
            known.executors[order] = made
            while len(known.executors) > _MOST:
                known.executors.popitem(last=False)
        known.executors.move_to_end(order)
        return known.executors[order]

    @staticmethod
    def _key(captures: Sequence[StepPrograms], kind: StepKind) -> tuple[frozenset[int], StepKind]:
        return frozenset(map(id, captures)), kind

    def _loss_bytes(self, captures: frozenset[int], measure: Callable[[], int]) -> int:
        """Those of another schedule of these captures, or measured now."""
        for (known, _), table in self._tables.items():
            if known == captures:
                return table.schedule.known_workload().loss_bytes
        return measure()

    def _fitting(
        self, captures: Sequence[StepPrograms], plan: _Plan, kind: StepKind
    ) -> tuple[int, Sequence[Program], Schedule]:
        """As `first_that_fits`; an error about the budget names smaller blocks if they help."""
        machine, memory = self._options.hardware, self._budget.nbytes
        try:
            return first_that_fits(captures, plan, machine, memory, may_cut=self._exchange.is_alone)
        except TooSmallError as error:
            raise with_true_hint(error, captures[0].at(0), partial(_with_blocks, captures, plan)) from None

    def _planned(self, programs: Sequence[Program], kind: StepKind, loss_bytes: int) -> Schedule:
        with self._options.memory_for(self._budget.nbytes, programs) as memory:
            own: dict[str, Any] = {
                "memory": memory,
                "activations": self._options.activations,
                "loss_bytes": loss_bytes,
                "hardware": self._options.hardware,
                "usual": usual_machine(self._options.device),
                "masters": self._options.masters,
                "most_result_bytes": None if self._options.keeps_results else 0,
            }
            planned = self._exchange.scheduled(step_schedule(programs, kind, **own))
        if not any(op.what == "G" for op in planned.ops):
            raise ExecuteError(
                "no parameter of the model gets a gradient.\n  A step trains parameters that require grad and that "
                "the outputs depend on.\n  Unfreeze some, or call the model without a TrainStep."
            )
        planned.check()
        return planned


def _with_blocks(captures: Sequence[StepPrograms], plan: _Plan, block_bytes: int) -> Schedule:
    made = {id(each): each for each in captures}
    programs = {key: each.with_blocks(block_bytes) for key, each in made.items()}
    return plan([programs[id(each)] for each in captures])
