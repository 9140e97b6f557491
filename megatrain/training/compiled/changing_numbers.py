"""Numbers of Python that change from call to call: they are followed, and too many captures for them are told."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from megatrain.base.counts import counted
from megatrain.errors import ManyCapturesWarning
from megatrain.tracer.arguments import Arguments, NumberAttribute
from megatrain.tracer.calls import call_text
from megatrain.tracer.python.snapshot import KeptValue
from megatrain.tracer.source_line import SourceLine
from megatrain.tracer.spec import CALLS, TensorSpec, is_equal
from megatrain.tracer.traced import TracedModule

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
    "A capture and its plan may take longer than a call, and are kept. Let shapes come again: lengths=1024, a "
    "collator that pads to a multiple, or packing. docs/trainers.md says how, under batches of many shapes."
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
