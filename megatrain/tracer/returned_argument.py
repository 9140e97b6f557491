"""ReturnedArgument: a dictionary of the caller's that a forward changes and returns, as modules in a pipeline do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ReturnedArgument:
    """What a forward changes in it; everything else stays the caller's own.

    Args:
        place: Of the argument: its position or its keyword.
        changed: Keys that it has set.
        removed: Keys that it has removed.
    """

    place: int | str
    changed: tuple[Any, ...]
    removed: tuple[Any, ...]

    @staticmethod
    def of(place: int | str, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> ReturnedArgument:
        """Compares what an argument held before and after the forward."""
        changed = tuple(key for key, value in after.items() if key not in before or before[key] is not value)
        return ReturnedArgument(place, changed, tuple(key for key in before if key not in after))

    def put(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Mapping[Any, Any]) -> dict[Any, Any]:
        """Changes the caller's argument as the forward would have done, from a call's result; returns it."""
        given = args[self.place] if isinstance(self.place, int) else kwargs[self.place]
        given.update((key, result[key]) for key in self.changed)
        for key in self.removed:
            given.pop(key, None)
        return given

    def __str__(self) -> str:
        parts = [f"{word} {', '.join(map(repr, keys))}" for word, keys in
                 (("sets", self.changed), ("removes", self.removed)) if keys]  # fmt: skip
        return f"argument `{self.place}`: {'; '.join(parts)}"
