"""ChangingNumbers: numbers among the arguments of calls that are others at each call, which captures then follow."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from megatrain.device import Device
from megatrain.tracer.arguments import Arguments, call_signature

MANY = 3
"""So many values of a number have captures: a flag or a mode has two, and stays a constant of each capture."""


class ChangingNumbers:
    """Knows for each kind of call which numbers are followed. Two calls of one kind differ in numbers alone.

    Args:
        device: Where the model computes.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._seen: dict[Hashable, dict[int, set[str]]] = {}
        self._followed: dict[Hashable, Sequence[int]] = {}
        self._refused: set[tuple[Hashable, tuple[int, ...]]] = set()

    def kind_of(self, arguments: Arguments, signature: Hashable) -> Hashable:
        """Tells kinds of calls apart; None for a call without numbers.

        Args:
            arguments: Of the call.
            signature: Of the model.
        """
        places = arguments.numbers
        return (call_signature(arguments, self._device, places), signature) if places else None

    def followed(self, kind: Hashable, arguments: Arguments) -> Arguments:
        """Returns the arguments with the followed numbers in tensors."""
        places = self._followed.get(kind)
        return arguments.with_numbers(places) if places else arguments

    def note(self, kind: Hashable, arguments: Arguments) -> tuple[int, ...]:
        """Notes the numbers of a call that has no capture yet; returns the places of those to be followed."""
        if kind is None:
            return ()
        seen = self._seen.setdefault(kind, {})
        for place in arguments.numbers:
            values = seen.setdefault(place, set())
            if len(values) < MANY:
                values.add(repr(arguments.leaves[place]))
        wanted = tuple(place for place, values in seen.items() if len(values) == MANY)
        return () if (kind, wanted) in self._refused else wanted

    def follow(self, kind: Hashable, places: Sequence[int]) -> None:
        """Has these numbers followed in later calls of the kind."""
        self._followed[kind] = places

    def refuse(self, kind: Hashable, places: tuple[int, ...]) -> None:
        """Leaves the numbers of a kind constants: Python decides on one of these."""
        self._followed.pop(kind, None)
        self._refused.add((kind, places))
