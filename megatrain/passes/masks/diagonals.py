"""What a tensor holds as a function of positions: `Line` for numbers of positions, `Diagonals` for masks of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Shape = Sequence[int]
# Up to these numbers each whole number is an element of the dtype, and sums of two such elements are exact.
_EXACT = {
    torch.int64: 2**62,
    torch.int32: 2**31 - 1,
    torch.int16: 2**15 - 1,
    torch.float64: 2**53,
    torch.float32: 2**24,
}


@dataclass(frozen=True, slots=True)
class Line:
    """A tensor of whole numbers: each element is `offset`, and `slope` for each step along a dimension.

    Args:
        offset: The first element.
        slopes: By dimension, counted from the last: -1, -2, ... None of them is 0.
    """

    offset: int
    slopes: Mapping[int, int]

    def within(self, shape: Shape, dtype: torch.dtype) -> Line | None:
        """The line over a shape; None if a tensor of this dtype doesn't hold all its numbers exactly."""
        line = Line(self.offset, {dim: slope for dim, slope in self.slopes.items() if shape[dim] > 1})
        least, most = line.range(shape)
        return line if -_EXACT.get(dtype, -1) <= least and most <= _EXACT.get(dtype, -1) else None

    def range(self, shape: Shape) -> tuple[int, int]:
        """The least and the largest element."""
        ends = [slope * (shape[dim] - 1) for dim, slope in self.slopes.items()]
        return self.offset + sum(min(0, end) for end in ends), self.offset + sum(max(0, end) for end in ends)

    def plus(self, other: Line, factor: int = 1) -> Line:
        """The sum with another line, or with a multiple of it."""
        dims = {*self.slopes, *other.slopes}
        slopes = {dim: self.slopes.get(dim, 0) + factor * other.slopes.get(dim, 0) for dim in dims}
        return Line(self.offset + factor * other.offset, {dim: slope for dim, slope in slopes.items() if slope})

    def times(self, factor: int) -> Line:
        """A multiple."""
        return Line(self.offset * factor, {dim: slope * factor for dim, slope in self.slopes.items() if factor})


@dataclass(frozen=True, slots=True)
class Diagonals:
    """A tensor whose elements depend on the difference of two positions alone: on column minus row.

    Args:
        pair: The dimensions of row and column, counted from the last: (-2, -1) in a mask of queries and keys. None if
            all elements are equal.
        pieces: `(first, last, value)` for differences from `first` to `last`, ascending, without gaps.
    """

    pair: tuple[int, int] | None
    pieces: tuple[tuple[int, int, Any], ...]

    @staticmethod
    def constant(value: Any) -> Diagonals:
        """All elements are equal."""
        return Diagonals(None, ((0, 0, value),))

    @staticmethod
    def of(pair: tuple[int, int], pieces: Sequence[tuple[int, int, Any]], shape: Shape) -> Diagonals | None:
        """Diagonals over a shape: pieces are cut to its differences, equal neighbours joined.

        None if rows or columns are one alone, so that elements depend on the other position.
        """
        first, last = 1 - shape[pair[0]], shape[pair[1]] - 1
        joined: list[tuple[int, int, Any]] = []
        for start, end, value in pieces:
            start, end = max(start, first), min(end, last)
            if start > end:
                continue
            if joined and _is_same(joined[-1][2], value):
                start = joined.pop()[0]
            joined.append((start, end, value))
        if len(joined) == 1:
            return Diagonals.constant(joined[0][2])
        return Diagonals(pair, tuple(joined)) if shape[pair[0]] > 1 and shape[pair[1]] > 1 else None

    @property
    def value(self) -> Any:
        """The one value, if all elements are equal."""
        return self.pieces[0][2] if self.pair is None else None

    def at(self, difference: int) -> Any:
        """The element for a difference of positions."""
        if self.pair is None:
            return self.value
        return next(value for first, last, value in self.pieces if first <= difference <= last)

    def turned(self) -> tuple[tuple[int, int, Any], ...]:
        """The pieces, where row and column have changed places."""
        return tuple((-last, -first, value) for first, last, value in reversed(self.pieces))


def joint_cuts(operands: Sequence[Diagonals]) -> tuple[tuple[int, int] | None, list[tuple[int, int]]] | None:
    """The common pair of dimensions of some bands, and runs of differences in which none changes its value.

    None if they depend on different dimensions.
    """
    pairs = {bands.pair for bands in operands if bands.pair is not None}
    if len(pairs) > 1:
        return None
    if not pairs:
        return None, [(0, 0)]
    cut = [bands for bands in operands if bands.pair is not None]
    starts = sorted({first for bands in cut for first, _, _ in bands.pieces})
    end = cut[0].pieces[-1][1]
    return pairs.pop(), list(zip(starts, [*(start - 1 for start in starts[1:]), end], strict=True))


def compared(line: Line, holds: Callable[[int, int], bool], shape: Shape) -> Diagonals | None:
    """The result of a comparison of a line with 0; None if it isn't of two positions' difference.

    Args:
        line: The difference of the two operands.
        holds: The comparison, of two numbers.
        shape: Of the result.
    """
    least, most = line.range(shape)
    signs = {sign for sign, is_there in ((-1, least < 0), (0, least <= 0 <= most), (1, most > 0)) if is_there}
    answers = {holds(sign, 0) for sign in signs}
    if len(answers) == 1:
        return Diagonals.constant(answers.pop())
    if len(line.slopes) != 2 or sum(line.slopes.values()) != 0:
        return None
    row, column = sorted(line.slopes)
    slope = line.slopes[column]
    # offset + slope * difference changes its sign around -offset / slope, which is rounded up here, and down.
    before, behind = -(line.offset // slope) - 1, -line.offset // slope + 1
    far = max(shape[row], shape[column])
    pieces = [(-far, before, holds(-slope, 0)), (before + 1, behind - 1, holds(0, 0)), (behind, far, holds(slope, 0))]
    return Diagonals.of((row, column), pieces, shape)


def _is_same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (math.isnan(one) and math.isnan(other)))
