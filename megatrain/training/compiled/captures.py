"""Captures: the graphs of one model, one for each way in which its calls differ."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain

import torch
from torch import nn

from megatrain.base.progress import stage
from megatrain.device.device_budget import DeviceBudget
from megatrain.errors import TooSmallError, TraceError
from megatrain.optim.grad_scaler import warn_of_torchs_own
from megatrain.passes.interpret import looks_in_backward
from megatrain.passes.measure import KnownCosts
from megatrain.passes.program import Program
from megatrain.passes.rewrites.loss_only import loss_only
from megatrain.planning.kernel_choice import RECORDED_FROM, with_kernels
from megatrain.planning.options import Limits, check_opaque
from megatrain.planning.plan_step import scheduled, with_true_hint
from megatrain.planning.step_programs import StepPrograms, undisturbed
from megatrain.runtime.executor import Executor
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.tracer.arguments import Arguments, call_signature
from megatrain.tracer.guards import GuardCheck, GuardFailedError
from megatrain.tracer.python.assumptions import AssumptionCheck
from megatrain.tracer.python.followed_numbers import DecidedError
from megatrain.tracer.python.watch import ModelWatch
from megatrain.tracer.recording.obstacles import Attempt
from megatrain.tracer.recording.opaque import Observer, Opaque
from megatrain.tracer.trace import traced_call
from megatrain.tracer.traced import TracedModule, is_same_but_for_numbers, is_same_capture
from megatrain.training.compiled.changing_numbers import CapturePace, ChangingNumbers

# Paths through one signature's checks in mid-step that are kept as graphs of their own.
MOST_PATHS = 8
# Captures kept per signature for different states of attributes, so that a value that changes at every call doesn't
# fill the memory.
MOST_STATES = 8


class Lowered:
    """Everything that is made of a capture, each on first use; captures that computed the same share one.

    Attributes:
        executor: Runs the schedule of a call; made at the first call.
        why_kernels: Why the kernels of a call are recorded, or aren't; empty where nothing was to be chosen.
    """

    def __init__(self, traced: TracedModule, options: Limits, budget: DeviceBudget, *, is_training: bool):
        self._traced = traced
        self._options = options
        self._budget = budget
        self._is_training = is_training
        self._costs = KnownCosts()
        self._of_steps: dict[tuple[str, ...] | None, StepPrograms] = {}
        self.executor: Executor | None = None
        self.why_kernels = ""
        self._schedule: Schedule | None = None
        self._num_calls = 0

    @property
    def program(self) -> Program:
        """The blocks of a call."""
        return self.for_step(self._traced).at(0)

    @property
    def why_kernels_of_steps(self) -> list[str]:
        """Why the kernels of training steps are recorded, or aren't."""
        return [why for each in self._of_steps.values() if (why := each.why_kernels)]

    @property
    def is_planned(self) -> bool:
        """Whether the schedule of a call was asked for."""
        return self._schedule is not None

    @property
    def schedule(self) -> Schedule:
        """The schedule of a call: a training step may fit where a call doesn't.

        Raises:
            ScheduleError: If the memory budget is too small for it.
        """
        if self._schedule is None:
            self._schedule = self._planned()
        return self._schedule

    def note_call(self) -> None:
        """Called before each call: the kernels of a later one may be recorded."""
        self._num_calls += 1
        if self._options.kernels != "auto":
            return
        why = "" if self.executor is None else self.executor.why_unrecorded
        if why:  # as they are launched one by one after all, nothing needs to be recomputed
            self._schedule = self.executor = None
            self.why_kernels = f"one by one: {why}"
        elif self._num_calls == RECORDED_FROM:
            before, (self._schedule, self.why_kernels) = self.schedule, self._with_kernels()
            self.executor = self.executor if self._schedule is before else None

    @property
    def _limits(self) -> Limits:
        # No plans are compared for calls, except for their kernels.
        return replace(self._options, device_memory=self._budget.nbytes, hardware=None)

    def _plan(self, limits: Limits, program: Program | None = None) -> Schedule:
        program = self.program if program is None else program
        trains = any(ref.kind == "value" and program.values[ref.name].requires_grad for ref in program.outputs)
        kind = StepKind("train" if self._is_training and trains else "forward", limits.transfer)
        return scheduled([program], kind, limits)

    def _planned(self) -> Schedule:
        limits = self._limits
        try:
            planned = self._plan(limits)
        except TooSmallError as error:
            smaller = partial(self.for_step(self._traced).with_blocks, in_pieces=False)
            raise with_true_hint(error, self.program, lambda size: self._plan(limits, smaller(size))) from None
        planned.check()
        return planned

    def _with_kernels(self) -> tuple[Schedule, str]:
        table, why = with_kernels(self.schedule, [self.program], self._limits, self._plan)
        table.check()
        return table, why

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
        """Returns the programs of training steps of a capture of this object, or of what `loss_only` makes of it."""
        names = tuple(node.name for node in traced.results)  # equal in captures that computed the same
        key = None if len(names) == len(self._traced.results) else names
        if key not in self._of_steps:
            self._of_steps[key] = StepPrograms(traced, self._options, self._costs)
        return self._of_steps[key]


@dataclass(slots=True, eq=False)
class Variant:
    """One capture of the model, for one signature of inputs.

    Args:
        traced: The capture.
        lowered: Its programs and schedule; captures that computed the same share them.
        guards: Compares what was read from inputs.
        assumptions: Compares what was read from Python state.
        reasons: Why earlier captures of the same signature didn't fit when this capture was made.
        number: The number of this capture of the model, from 1; dropped captures count too.
        of_loss: The capture without results that a training step on the model's own loss doesn't need.
    """

    traced: TracedModule
    lowered: Lowered
    guards: GuardCheck
    assumptions: AssumptionCheck
    reasons: tuple[str, ...] = ()
    number: int = 0
    of_loss: TracedModule | None = None

    @property
    def program(self) -> Program:
        """The blocks of a call."""
        return self.lowered.program

    @property
    def schedule(self) -> Schedule:
        """The schedule of a call."""
        return self.lowered.schedule

    @property
    def opaque(self) -> tuple[Opaque | Observer, ...]:
        """Modules and hooks that run their own code at each step."""
        return self.lowered.opaque

    @property
    def runs_in_backward(self) -> bool:
        """Whether hooks of the user's run in the backward of blocks."""
        return self.lowered.runs_in_backward

    def for_step(self, *, is_own_loss: bool) -> tuple[TracedModule, StepPrograms]:
        """Returns what a training step runs, without dead outputs if it differentiates the model's own loss."""
        if not is_own_loss:
            return self.traced, self.lowered.for_step(self.traced)
        if self.of_loss is None:
            self.of_loss = loss_only(self.traced)
        return self.of_loss, self.lowered.for_step(self.of_loss)


def first_fitting(
    variants: list[Variant], inputs: Sequence[torch.Tensor], tree_version: int, failed: Mapping[Variant, str]
) -> tuple[Variant | None, tuple[str, ...]]:
    """Finds the variant of a signature whose assumptions and guards hold, and moves it to the front.

    Args:
        variants: Latest used first.
        inputs: The call's tensors.
        tree_version: Of the model; assumptions that held for it aren't read again.
        failed: Variants that failed in the middle of a step for this call, with the failures.

    Returns:
        The variant or None, and the failures of the variants before it, as texts, of the latest capture first.
    """
    failures: dict[int, str] = {}
    for index, variant in enumerate(variants):
        failure = failed.get(variant) or variant.assumptions.first_failure(tree_version)
        guard = variant.guards.first_failure(inputs) if failure is None else None
        if failure is None and guard is None:
            variants.insert(0, variants.pop(index))
            break
        failures[variant.number] = failure or str(guard)
    else:
        variant = None
    return variant, tuple(dict.fromkeys(failures[number] for number in sorted(failures, reverse=True)))


def add_variant(variants: list[Variant], variant: Variant) -> None:
    """Puts a new variant in front; of the variants for other states of attributes, only the latest used stay."""
    others = 1
    for other in list(variants):
        others += not other.assumptions.held
        if not other.assumptions.held and others > MOST_STATES:
            variants.remove(other)
    variants.insert(0, variant)


class Variants:
    """All captures of one model.

    Attributes:
        written: State that forwards write, by key: in any capture so far, including dropped ones.
    """

    def __init__(self, model: nn.Module, options: Limits, budget: DeviceBudget):
        self._model = model
        self._options = options
        self._budget = budget
        self._known: dict[Hashable, list[Variant]] = {}
        self._watch = ModelWatch(model)
        self._shapes_version = self._watch.shapes_version
        self._opaque: dict[str, str] = {}
        self.written: set[str] = set()
        self._heard: set[str] = set()
        self._count = 0
        self._pace = CapturePace()
        self._changing = ChangingNumbers()

    @property
    def tree_version(self) -> int:
        """A number that changes whenever the modules, their registries or hooks change."""
        return self._watch.version

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """Those of the model when the latest call was found."""
        return self._watch.parameters

    def __iter__(self) -> Iterator[Variant]:
        """In the order in which they were captured."""
        return iter(sorted(chain.from_iterable(self._known.values()), key=lambda variant: variant.number))

    def find(
        self,
        arguments: Arguments,
        failed: Mapping[Variant, str] | None = None,
        before_capture: Callable[[], object] = lambda: None,
    ) -> tuple[Variant, Arguments]:
        """Finds the variant for a call, captured now if none fits. Each guard is read once: it waits for the device.

        Args:
            arguments: Of the call.
            failed: Variants that failed in the middle of a step for this call, with the failures.
            before_capture: Called if none fits.

        Returns:
            The variant, and the arguments as it takes them: tensors hold the numbers that it follows.

        Raises:
            TraceError: If the call can't be captured.
        """
        kind, known = self._of_signature(arguments)
        given = self._changing.followed(kind, arguments)
        if given is not arguments:
            _, known = self._of_signature(given)
        variant, failures = first_fitting(known, given.tensors, self.tree_version, failed or {})
        if variant is not None:
            self._pace.note_call()
            return variant, given
        before_capture()
        with undisturbed():
            traced, given = self._traced(kind, arguments)
            _, known = self._of_signature(given)
            variant = self._variant(traced, known)
        self._count += 1
        variant.number, variant.reasons = self._count, failures
        add_variant(known, variant)
        self.written.update(key for key, _ in variant.traced.writes_back)
        self._pace.note_capture(kind, arguments, failures, traced)
        return variant, given

    def learn(self, failure: GuardFailedError, arguments: Arguments, failed: Mapping[Variant, str]) -> None:
        """Makes the code around a check opaque after the check has selected too many variants.

        Raises:
            TraceError: If no wider code is left, and a capture doesn't hold even for its own call.
        """
        reason = f"reads what changes from step to step: {failure.text}"
        attempt = Attempt(opaque=self._opaque).with_opaque(failure.calls, reason, self._model)
        if attempt is None:
            # The model returns a count or a random number of Python: an old value won't come back.
            _, known = self._of_signature(arguments)
            known[:] = [variant for variant in known if variant not in failed]
        if len(failed) < MOST_PATHS:
            if len(failed) > 1:
                self._changing.follow_reads(self._of_signature(arguments)[0])
            return
        if attempt is None:
            raise TraceError(
                f"{failure.text}; then {failure.actual}, and something else in each of {len(failed)} runs.\n"
                "  Values other than tensors must be the same when a call starts again from the same state.\n"
                "  Leave values of a clock, or of the system's random source, out of the result."
            )
        self._opaque = dict(attempt.opaque)
        self._of_signature(arguments)[1].clear()

    def _of_signature(self, arguments: Arguments) -> tuple[Hashable, list[Variant]]:
        """The kind of a call, and the variants for its signature, latest used first."""
        kind, numbers = call_signature(arguments, self._options.device)
        kind = kind, self._watch.signature()
        if self._shapes_version != self._watch.shapes_version:
            # The host store holds the present state: a capture for other shapes can't run on it.
            self._known.clear()
            self._shapes_version = self._watch.shapes_version
        return kind, self._known.setdefault((kind, numbers), [])

    def _traced(self, kind: Hashable, arguments: Arguments) -> tuple[TracedModule, Arguments]:
        """Captures a call; follows the numbers that change, if Python only computes with them."""
        with stage("capturing"):
            plain = self._capture(arguments)
            places = self._changing.note(kind, arguments, plain)
            if places is not None:
                given = arguments.with_numbers(places.leaves, places.attributes, follows_reads=places.reads)
                error: Exception | None = None
                try:
                    traced = self._capture(given)
                    if is_same_but_for_numbers(plain, traced):
                        self._changing.follow(kind, places)
                        return traced, given
                except Exception as raised:  # the model's own code raises anything where a number is not a plain one
                    error = raised
                self._changing.refuse(kind, places)
                self._pace.decided_at = error.place if isinstance(error, DecidedError) else None
        return plain, arguments

    def _capture(self, arguments: Arguments) -> TracedModule:
        return traced_call(self._model, arguments, self._options.device.torch_device, self._opaque)

    def _variant(self, traced: TracedModule, others: Sequence[Variant]) -> Variant:
        check_opaque(traced, self._options.opaque, self._heard)
        if torch.is_grad_enabled():
            regions = (region for node in traced.graph.nodes for region in node.meta.get("autocast", ()))
            warn_of_torchs_own((dtype for _, dtype in regions), self._options.device)
        guards = GuardCheck(traced.guards, traced.graph, traced.constants)
        assumptions = AssumptionCheck(traced.assumptions)
        same = (other.lowered for other in others if is_same_capture(other.traced, traced))
        made = next(same, None) or Lowered(traced, self._options, self._budget, is_training=torch.is_grad_enabled())
        return Variant(traced, made, guards, assumptions)
