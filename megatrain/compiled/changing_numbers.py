"""ChangingNumbers: arguments and attributes of modules that are another number at each call; captures follow these."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from torch import nn

from megatrain.tracer.arguments import Arguments, NumberAttribute
from megatrain.tracer.python.assumptions import OwnAttribute
from megatrain.tracer.python.snapshot import KeptValue
from megatrain.tracer.traced import TracedModule

MANY = 3
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
            if len(values) < MANY:
                values.add(repr(value))
        leaves = tuple(place for place, _ in found if len(seen[place]) == MANY)
        attributes = tuple(a for a in read if len(seen[a.module, a.name]) == MANY)
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
        place, kept = value.place, value.kept
        module = place.module() if isinstance(place, OwnAttribute) else None
        if module is not None and isinstance(kept, KeptValue):
            attribute = NumberAttribute(module, place.name, value.path, type(kept.value))
            if attribute.now() is not None:
                yield attribute
