"""Parts: what chunks of a head and tiles of tokens have in common: sums of their gradients, and how alike they are."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, repeat
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from megatrain.device import find
from megatrain.hardware.work import Kernels


class GradientSum:
    """A sum of gradients in fp32 or wider, rounded once to the dtype of the tensor.

    Args:
        tensor: Whose gradient it is.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._dtype = tensor.dtype
        self._is_empty = True
        self._total = torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))

    def add(self, part: torch.Tensor) -> None:
        """Adds a gradient of the tensor."""
        self._is_empty = False
        self._total.add_(part)

    def add_at(self, part: torch.Tensor, dim: int, place: slice) -> None:
        """Adds the gradient of a range of the tensor along a dimension."""
        self._is_empty = False
        self._total.narrow(dim, place.start, place.stop - place.start).add_(part)

    def add_rows(self, gradients: torch.Tensor) -> None:
        """Adds the sum of all rows of a matrix, as for a bias."""
        self._is_empty = False
        self._total.add_(gradients.sum(0, dtype=self._total.dtype))

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds a product of two matrices, which isn't rounded before."""
        self._is_empty = False
        find(left.device).add_product(self._total, left, right)

    def rounded(self) -> torch.Tensor | None:
        """The sum, in the dtype of the tensor; None if nothing was added."""
        return None if self._is_empty else self._total.to(self._dtype)


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
