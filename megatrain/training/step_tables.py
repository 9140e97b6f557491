"""StepTables: the schedules of whole steps, one per combination of captures, and their executors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from megatrain.errors import ExecuteError
from megatrain.memory.device_budget import DeviceBudget
from megatrain.options import Options
from megatrain.passes.program import Program
from megatrain.runtime.engine import Engine
from megatrain.runtime.executor import Executor
from megatrain.runtime.gradients.landing import LandingArena
from megatrain.scheduler.from_program import step_schedule
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind

# Steps may differ in sizes and numbers of micro-batches: the schedules used last are kept.
_MOST = 16


class StepTables:
    """Makes schedules of whole steps, and keeps them.

    Args:
        options: The options of `compile`.
        budget: The bound of the device memory that schedules take.
    """

    def __init__(self, options: Options, budget: DeviceBudget):
        self._options = options
        self._budget = budget
        self._arena: LandingArena | None = None
        self._schedules: OrderedDict[tuple[tuple[int, ...], StepKind], tuple[Sequence[Program], Schedule]] = (
            OrderedDict()
        )
        self._executors: dict[object, Executor] = {}

    def kind(self, micro_batches: int, updates: str, *, clip: bool) -> StepKind:
        """Returns the kind of a training step of the compiled model."""
        return StepKind("train", self._options.transfer, micro_batches, updates, clip, outputs="release")

    def schedule(self, programs: Sequence[Program], kind: StepKind, loss_bytes: Callable[[], int]) -> Schedule:
        """Returns the checked schedule of a step.

        Args:
            programs: One per micro-batch.
            kind: The kind of the step.
            loss_bytes: Measures the loss; called once for these programs.

        Raises:
            ScheduleError: If the memory is too small, or the micro-batches can't share blocks.
            ExecuteError: If there is nothing to train.
        """
        key = self._key(programs, kind)
        if key not in self._schedules:
            self._schedules[key] = tuple(programs), self._planned(programs, kind, self._loss_bytes(key[0], loss_bytes))
            while len(self._schedules) > _MOST:
                old, _ = self._schedules.popitem(last=False)
                self._executors.pop(old, None)
        self._schedules.move_to_end(key)
        return self._schedules[key][1]

    def has_executor(self, programs: Sequence[Program], kind: StepKind) -> bool:
        """Tells whether `executor` was called for these."""
        return self._key(programs, kind) in self._executors

    def executor(self, programs: Sequence[Program], kind: StepKind, engine: Engine) -> Executor:
        """Returns the executor of a known schedule; the first one moves the model into the engine's store."""
        key = self._key(programs, kind)
        if key not in self._executors:
            _, planned = self._schedules[key]
            if self._arena is None:
                self._arena = LandingArena(engine.bus)
                engine.gradients.clear()  # gradients land there from now on
            self._executors[key] = Executor(programs, planned, engine, arena=self._arena)
        return self._executors[key]

    @staticmethod
    def _key(programs: Sequence[Program], kind: StepKind) -> tuple[tuple[int, ...], StepKind]:
        return tuple(map(id, programs)), kind

    def _loss_bytes(self, programs: tuple[int, ...], measure: Callable[[], int]) -> int:
        """Those of another schedule of these programs, or measured now."""
        for (known, _), (_, planned) in self._schedules.items():
            if known == programs:
                return planned.known_workload().loss_bytes
        return measure()

    def _planned(self, programs: Sequence[Program], kind: StepKind, loss_bytes: int) -> Schedule:
        planned = step_schedule(
            programs,
            kind,
            memory=self._budget.nbytes,
            activations=self._options.activations,
            loss_bytes=loss_bytes,
        )
        if not any(op.what == "G" for op in planned.ops):
            raise ExecuteError(
                "no parameter of the model gets a gradient.\n  A step trains parameters that require grad and that "
                "the outputs depend on.\n  Unfreeze some, or call the model without a TrainStep."
            )
        planned.check()
        return planned
