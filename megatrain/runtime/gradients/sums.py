"""Sums of a parameter's gradients over micro-batches, on the compute device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

ParameterGradient = tuple[torch.Tensor | None, bool]
"""A parameter's gradient, or None, and whether others hold its memory too."""


def marked(
    gradients: Sequence[torch.Tensor | None], is_held: Callable[[torch.Tensor], bool]
) -> list[ParameterGradient]:
    """Marks each gradient whose memory is also that of a value, or of another gradient.

    Args:
        gradients: Of a block's parameters.
        is_held: Tells whether a call holds a tensor's memory.
    """
    places = [g.untyped_storage().data_ptr() for g in gradients if g is not None and g.layout == torch.strided]
    count = Counter(places)
    return [
        (
            g,
            g is not None and (is_held(g) or (g.layout == torch.strided and count[g.untyped_storage().data_ptr()] > 1)),
        )
        for g in gradients
    ]


def added(
    known: Sequence[ParameterGradient] | None, found: Sequence[ParameterGradient]
) -> tuple[list[ParameterGradient], Callable[[], None]]:
    """Adds one micro-batch's gradients to the sums of those before, in their order.

    Returns:
        The new sums, and the rest of the work, which takes no memory: until it runs, the old sums are as they were.
    """
    before = known or [(None, False)] * len(found)
    in_place = [_adds_in_place(*pair) for pair in zip(before, found, strict=True)]
    sums = [
        old if is_in_place else _sum(old, new) for old, new, is_in_place in zip(before, found, in_place, strict=True)
    ]

    def add() -> None:
        for (total, _), (gradient, _), is_in_place in zip(sums, found, in_place, strict=True):
            if is_in_place and total is not None and gradient is not None:
                total.add_(gradient)

    return sums, add


def _adds_in_place(before: ParameterGradient, now: ParameterGradient) -> bool:
    """Tells whether nothing else uses the memory of the sum so far."""
    (total, is_shared), (gradient, _) = before, now
    if total is None or gradient is None or is_shared or total.layout != torch.strided:
        return False
    return total.untyped_storage().nbytes() == total.nbytes


def _sum(before: ParameterGradient, now: ParameterGradient) -> ParameterGradient:
    """Adds a gradient to the sum of earlier ones, in memory of its own."""
    total, gradient = before[0], now[0]
    if total is None or gradient is None:
        return now if total is None else before
    # Sparse ones join their parts, and a dense one takes a sparse one up only from the left.
    is_swapped = total.is_sparse and not gradient.is_sparse
    return (gradient + total if is_swapped else total + gradient), False
