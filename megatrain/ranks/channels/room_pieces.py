"""Pieces of tensors: so the next rank adds to the first piece of a sum while others are still on their way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from megatrain.sizes import SUM_PIECE_BYTES
from megatrain.tracer.spec import TensorSpec

Cut = tuple[slice, ...]
"""An index that gives a part of a tensor, in each of its layouts."""


class Piece(NamedTuple):
    """A part of one of several tensors.

    Attributes:
        number: Of the tensor.
        cut: The part.
    """

    number: int
    cut: Cut


def pieces(specs: Sequence[TensorSpec], most: int = SUM_PIECE_BYTES) -> list[list[Piece]]:
    """Divides tensors into groups of parts, in their order.

    Args:
        specs: Of the tensors.
        most: Bytes of a group, if no element is larger.

    >>> import torch
    >>> groups = pieces([TensorSpec((5,), torch.int8), TensorSpec((3,), torch.int8)], most=4)
    >>> [[(piece.number, *piece.cut) for piece in group] for group in groups]
    [[(0, slice(0, 4, None))], [(0, slice(4, 5, None)), (1,)]]
    """
    found: list[list[Piece]] = []
    room = 0
    for number, spec in enumerate(specs):
        for cut, nbytes in _cuts(spec.shape, spec.dtype.itemsize, most):
            if nbytes > room or not found:
                found.append([])
                room = most
            found[-1].append(Piece(number, cut))
            room -= nbytes
    return found


def _cuts(shape: Sequence[int], itemsize: int, most: int) -> Iterator[tuple[Cut, int]]:
    """Parts of a tensor, and the bytes of each."""
    nbytes = prod(shape) * itemsize
    if nbytes <= most or not shape:
        yield (), nbytes
        return
    row = nbytes // shape[0]
    if row > most:
        for index in range(shape[0]):
            yield from (((slice(index, index + 1), *cut), part) for cut, part in _cuts(shape[1:], itemsize, most))
        return
    rows = most // row
    for start in range(0, shape[0], rows):
        stop = min(start + rows, shape[0])
        yield (slice(start, stop),), (stop - start) * row
