"""Captures: the graphs of one model, one for each way in which its calls differ."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import fx, nn

from megatrain.compiled.lowered import Lowered
from megatrain.counts import counted
from megatrain.errors import ManyCapturesWarning, TraceError
from megatrain.memory.device_budget import DeviceBudget
from megatrain.optim.grad_scaler import warn_of_torchs_own
from megatrain.options import Options, check_opaque
from megatrain.passes.program import Program
from megatrain.passes.rewrites.loss_only import loss_only
from megatrain.planning.step_programs import StepPrograms, undisturbed
from megatrain.progress import stage
from megatrain.scheduler.schedule import Schedule
from megatrain.tracer.arguments import Arguments, NumberAttribute, call_signature
from megatrain.tracer.calls import call_text
from megatrain.tracer.guards import GuardCheck, GuardFailedError
from megatrain.tracer.python.assumptions import AssumptionCheck
from megatrain.tracer.python.followed_numbers import DecidedError
from megatrain.tracer.python.snapshot import KeptValue
from megatrain.tracer.python.watch import ModelWatch
from megatrain.tracer.recording.obstacles import Attempt
from megatrain.tracer.recording.opaque import Observer, Opaque
from megatrain.tracer.source_line import SourceLine
from megatrain.tracer.spec import CALLS, TensorSpec, is_equal
from megatrain.tracer.trace import traced_call
from megatrain.tracer.traced import TracedModule, is_same_but_for_numbers, is_same_capture

MOST_OF_ONE = 3
"""So many values of a number have captures: a flag or a mode has two, and stays a constant of each capture."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where numbers are: places among the leaves of arguments, attributes, and whether in tensors that Python reads."""

    leaves: tuple[int, ...] = ()
    attributes: tuple[NumberAttribute, ...] = ()
    reads: bool = False


class ChangingNumbers:
    """Knows for each kind of call which numbers are followed. Two calls of one kind differ in numbers alone."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, dict[int | tuple[nn.Module, str], set[str]]] = {}
        self._followed: dict[Hashable, Places] = {}
        self._refused: set[tuple[Hashable, Places]] = set()
        self._reads: set[Hashable] = set()

    def followed(self, kind: Hashable, arguments: Arguments) -> Arguments:
        """Returns the arguments with the followed numbers in tensors; as they are where something else has come."""
        places = self._followed.get(kind)
        if places is None or any(attribute.now() is None for attribute in places.attributes):
            return arguments
        return arguments.with_numbers(places.leaves, places.attributes, follows_reads=places.reads)

    def note(self, kind: Hashable, arguments: Arguments, traced: TracedModule) -> Places | None:
        """Notes the numbers of a call that is captured now; returns those to follow from now on, None for none.

        Args:
            kind: Of the call.
            arguments: Of the call.
            traced: A capture with all numbers as constants.
        """
        read = list(_attributes(traced))
        found = [(place, arguments.leaves[place]) for place in arguments.numbers]
        seen = self._seen.setdefault(kind, {})
        for place, value in [*found, *(((a.module, a.name), a.now()) for a in read)]:
            values = seen.setdefault(place, set())
            if len(values) < MOST_OF_ONE:
                values.add(repr(value))
        leaves = tuple(place for place, _ in found if len(seen[place]) == MOST_OF_ONE)
        attributes = tuple(a for a in read if len(seen[a.module, a.name]) == MOST_OF_ONE)
        wanted = Places(leaves, attributes, kind in self._reads)
        return None if (kind, wanted) in self._refused or wanted == Places() else wanted

    def follow_reads(self, kind: Hashable) -> None:
        """Has numbers that are read from tensors followed from the next capture of the kind on."""
        self._reads.add(kind)

    def follow(self, kind: Hashable, places: Places) -> None:
        """Has these numbers followed in later calls of the kind."""
        self._followed[kind] = places

    def refuse(self, kind: Hashable, places: Places) -> None:
        """Leaves the numbers of a kind constants: Python decides on one of these."""
        self._followed.pop(kind, None)
        self._refused.add((kind, places))


def _attributes(traced: TracedModule) -> Iterable[NumberAttribute]:
    """The numbers that a forward has read from modules."""
    for value in traced.assumptions.values:
        module, kept = value.place.module, value.kept
        if module is not None and isinstance(kept, KeptValue):
            attribute = NumberAttribute(module, value.place.name, value.place.path, type(kept.value))
            if attribute.now() is not None:
                yield attribute


LATEST = 16
"""How many calls are looked at."""
MANY = 12
"""So many captures among them are told. A model has a few shapes, which come again; or always another one."""
LATEST_VALUES, MANY_VALUES = 32, 5
"""The same of captures for values: a mode or a flag has a few."""
_SHAPES = (
    "A capture and its plan may take longer than a call, and are kept. Let shapes come again: pad to a multiple, or "
    "pack. docs/trainers.md says how, under batches of many shapes."
)
_VALUES = (
    "Values of Python are constants of a capture, and a capture takes longer than a call. Let tensors hold what "
    "changes: a buffer, or an argument of one element (torch.tensor(value)), and compute without .item()."
)


class CapturePace:
    """Warns if most of the latest calls were captured, once for shapes and once for values.

    Attributes:
        decided_at: Where Python last decided on a number that changes; None if nothing tells.
    """

    def __init__(self) -> None:
        self._recent: deque[bool] = deque(maxlen=LATEST)
        self._of_values: deque[Hashable] = deque(maxlen=LATEST_VALUES)
        self._inputs: Mapping[str, str] = {}
        self._literals: Mapping[str, Any] = {}
        self._graph: fx.Graph | None = None
        self._told: set[str] = set()
        self.decided_at: SourceLine | None = None

    def note_call(self) -> None:
        """Notes a call for which there was a capture."""
        self._recent.append(False)
        self._of_values.append(None)

    def note_capture(self, kind: Hashable, arguments: Arguments, reasons: Sequence[str], traced: TracedModule) -> None:
        """Notes a call that was captured.

        Args:
            kind: Of the call: training and evaluation are two, and each has its first captures.
            arguments: Of the call.
            reasons: Why earlier captures of the same signature didn't fit.
            traced: The capture.
        """
        shape, value = self._changed_input(arguments), None
        if shape is None:
            value = self._changed_literal(arguments, traced) or _changed_state(reasons, traced)
            if value is None and reasons:
                shape = reasons[0].splitlines()[0]
        self._literals, self._graph = _literals(arguments), traced.graph
        self._recent.append(True)
        self._of_values.append(None if value is None else kind)
        changed = self._of_values.count(kind)
        # The first capture has no value before it.
        if value is not None and changed >= MANY_VALUES - 1:
            self._tell(changed + 1, len(self._of_values), value, _VALUES)
        elif sum(self._recent) >= MANY:
            self._tell(MANY, len(self._recent), shape or value or "other arguments than before", _SHAPES)

    def _tell(self, captures: int, calls: int, what: str, advice: str) -> None:
        if advice in self._told:
            return
        self._told.add(advice)
        text = (
            f"{captures} of the latest {counted(calls, 'call')} were captured anew.\n  The latest: {what}.\n  {advice}"
        )
        warnings.warn(text, ManyCapturesWarning, stacklevel=2)

    def _changed_input(self, arguments: Arguments) -> str | None:
        """Names the input whose shape isn't that of the capture before."""
        before = self._inputs
        self._inputs = {n: str(TensorSpec.of(t)) for n, t in zip(arguments.names, arguments.tensors, strict=True)}
        changed = (name for name, spec in self._inputs.items() if before.get(name, spec) != spec)
        return next((f"`{name}` is {self._inputs[name]}, and was {before[name]}" for name in changed), None)

    def _changed_literal(self, arguments: Arguments, traced: TracedModule) -> str | None:
        """Names the number that isn't that of the capture before, and where the forward uses it first."""
        for name, value in _literals(arguments).items():
            before = self._literals.get(name, value)
            if not is_equal(before, value):
                line = self.decided_at or _first_difference(self._graph, traced.graph)
                return f"`{name}` is {value!r}, and was {before!r}" + (f", read at {line}" if line else "")
        return None


def _literals(arguments: Arguments) -> dict[str, Any]:
    """The numbers among the arguments; other literals have a few values each."""
    pairs = zip(arguments.leaf_names, arguments.leaves, strict=True)
    return {name: leaf for name, leaf in pairs if type(leaf) in (int, float, complex)}


def _first_difference(before: fx.Graph | None, now: fx.Graph) -> SourceLine | None:
    """The line of the first call that one graph makes and another doesn't."""
    calls = [[n for n in graph.nodes if n.op in CALLS] for graph in (before, now) if graph is not None]
    pairs = zip(*calls, strict=False) if len(calls) == 2 else ()
    return next((new.meta["source"] for old, new in pairs if call_text(old) != call_text(new)), None)


def _changed_state(reasons: Sequence[str], traced: TracedModule) -> str | None:
    """Says which value a capture had read, and what is there now; None for sizes, and for results of opaque modules."""
    if not reasons or reasons[0].startswith(("size(", "opaque ")) or " has the shape " in reasons[0]:
        return None
    reason = reasons[0].splitlines()[0]
    read = reason.partition(" == ")[0]
    now = next((f"; now {g.expected!r}" for g in traced.guards if str(g).partition(" == ")[0] == read), "")
    return reason + (now if "; now " not in reason else "")


# Paths through one signature's checks in mid-step that are kept as graphs of their own.
MOST_PATHS = 8
# Captures kept per signature for different states of attributes, so that a value that changes at every call doesn't
# fill the memory.
MOST_STATES = 8


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
        """The schedule of a call; see `Lowered`."""
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
    """Finds the variant whose assumptions and guards hold, and moves it to the front.

    Args:
        variants: Of the call's signature, latest used first.
        inputs: The call's tensors.
        tree_version: See `AssumptionCheck.first_failure`.
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

    Args:
        model: The model.
        options: The options of `compile`.
        budget: Of the schedules of calls.

    Attributes:
        written: State that forwards write, by key: in any capture so far, including dropped ones.
    """

    def __init__(self, model: nn.Module, options: Options, budget: DeviceBudget):
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
        attempt = Attempt(opaque=self._opaque).with_opaque(failure.calls, failure.text, self._model)
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
