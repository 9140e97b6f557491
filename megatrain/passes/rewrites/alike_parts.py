"""AlikeParts: of a loop's parts that are alike, a measurement computes the first and the last alone."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, repeat
from typing import Any, Protocol, TypeVar, runtime_checkable

from megatrain.hardware.work import Kernels

_Part = TypeVar("_Part")


@runtime_checkable
class InParts(Protocol):
    """The target of a call that computes part by part: chunks of rows, tiles of tokens, some queries at a time."""

    def with_alike_parts(self, alike: AlikeParts) -> Callable[..., Any]:
        """The same call for one measurement on tensors without values."""
        ...


class AlikeParts:
    """Says which parts a measurement computes, and counts the kernels of those that it leaves out.

    Parts that follow each other are alike if they run the same code on tensors of the same layouts: without values
    nothing else can make a difference. The first of them is computed, because results and sums are made with it, and
    the last, because all earlier results are there by then. Those in between have the kernels of the last.

    An object belongs to one measurement: other threads may be training.
    """

    def __init__(self) -> None:
        self._noted: list[list[Kernels]] = []

    @contextmanager
    def counted_in(self, noted: list[Kernels]) -> Generator[None]:
        """Adds the kernels of parts that are left out to those that are noted meanwhile."""
        self._noted.append(noted)
        try:
            yield
        finally:
            self._noted.pop()

    def computed(self, parts: Iterable[Hashable]) -> Iterator[bool]:
        """Yields for each part whether it is computed; to be asked for the next when a part is done.

        Args:
            parts: What each part is known by; equal ones that follow each other are alike.
        """
        for _, alike in groupby(parts):
            number = sum(1 for _ in alike)
            yield True
            if number > 1:
                left_out = number - 2
                yield from repeat(False, left_out)
                begun = [len(noted) for noted in self._noted]
                yield True
                for noted, begin in zip(self._noted, begun, strict=True):
                    noted.extend(noted[begin:] * left_out)


def computed_parts(
    alike: AlikeParts | None, parts: Sequence[_Part], known_by: Callable[[_Part], Hashable]
) -> Iterator[tuple[bool, _Part]]:
    """Yields for each part whether it is computed, and the part; where nothing is measured all of them are."""
    if alike is None:
        return ((True, part) for part in parts)
    return zip(alike.computed(map(known_by, parts)), parts, strict=True)
