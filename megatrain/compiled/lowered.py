"""Lowered: the programs of a capture, its schedule, and what runs it."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial

from megatrain.errors import TooSmallError
from megatrain.hardware.machine import usual_machine
from megatrain.memory.device_budget import DeviceBudget
from megatrain.options import Options
from megatrain.passes.interpret import looks_in_backward
from megatrain.passes.measuring.known_costs import KnownCosts
from megatrain.passes.pipeline import AfterPass
from megatrain.passes.program import Program
from megatrain.planning.fitting_blocks import with_true_hint
from megatrain.planning.step_programs import Pieces, StepPrograms, lowered_for
from megatrain.runtime.executor import Executor
from megatrain.scheduler.from_program import step_schedule
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.tracer.recording.opaque import Observer, Opaque
from megatrain.tracer.traced import TracedModule


class Lowered:
    """Everything that is made of a capture, each on first use; captures that computed the same share one.

    Args:
        traced: The capture.
        options: The options of `compile`.
        budget: Of the schedules of calls.
        is_training: Whether gradients were enabled.

    Attributes:
        executor: Runs the schedule of a call; made at the first call.
    """

    def __init__(self, traced: TracedModule, options: Options, budget: DeviceBudget, *, is_training: bool):
        self._traced = traced
        self._options = options
        self._budget = budget
        self._is_training = is_training
        self._costs = KnownCosts()
        self._of_steps: dict[tuple[str, ...] | None, StepPrograms] = {}
        self.executor: Executor | None = None

    @cached_property
    def program(self) -> Program:
        """The blocks of a call."""
        return lowered(self._traced, self._options, costs=self._costs)

    @property
    def is_planned(self) -> bool:
        """Whether the schedule of a call was asked for."""
        return "schedule" in vars(self)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of a call: a training step may fit where a call doesn't.

        Raises:
            ScheduleError: If the memory budget is too small for it.
        """
        program, options = self.program, self._options
        trains = any(ref.kind == "value" and program.values[ref.name].requires_grad for ref in program.outputs)
        kind = StepKind("train" if self._is_training and trains else "forward", options.transfer)
        usual = usual_machine(options.device)
        with options.memory_for(self._budget.nbytes, [program]) as memory:
            fits = partial(
                step_schedule,
                kind=kind,
                memory=memory,
                activations=options.activations,
                usual=usual,
                most_result_bytes=None if options.keeps_results else 0,
            )
            try:
                planned = fits([program])
            except TooSmallError as error:
                smaller = partial(self._with_blocks, self._traced)
                raise with_true_hint(error, program, lambda size: fits([smaller(size)])) from None
        planned.check()
        return planned

    def _with_blocks(self, traced: TracedModule, block_bytes: int, pieces: Pieces | None = None) -> Program:
        return lowered(traced, replace(self._options, block_bytes=block_bytes), pieces, costs=self._costs)

    @cached_property
    def opaque(self) -> tuple[Opaque | Observer, ...]:
        """Modules and hooks that run their own code at each step."""
        targets = [node.target for node in self._traced.graph.nodes]
        return tuple(target for target in targets if isinstance(target, Opaque | Observer))

    @cached_property
    def runs_in_backward(self) -> bool:
        """Whether code of the user's that may look at the model runs in the backward of blocks."""
        return looks_in_backward(self._traced.graph)

    def for_step(self, traced: TracedModule) -> StepPrograms:
        """Returns the programs of training steps.

        Args:
            traced: A capture of this object, or what `loss_only` makes of it.
        """
        names = tuple(node.name for node in traced.results)  # equal in captures that computed the same
        key = None if len(names) == len(self._traced.results) else names
        if key not in self._of_steps:
            again = partial(lowered, traced, self._options, costs=self._costs)
            plain = (lambda: self.program) if key is None else None
            self._of_steps[key] = StepPrograms(
                self._options.chunking,
                again,
                plain,
                partial(self._with_blocks, traced),
                may_cut=self._options.block_bytes is None,
            )
        return self._of_steps[key]


def lowered(
    traced: TracedModule,
    options: Options,
    pieces: Pieces | None = None,
    after_pass: AfterPass | None = None,
    costs: KnownCosts | None = None,
) -> Program:
    """Lowers a capture by the options of `compile`, in pieces behind the user's passes."""
    given = options.block_bytes, options.passes, options.chunking, options.device.alignment
    return lowered_for(traced, *given, pieces, after_pass, costs=costs)
