"""Handing: the model's results in the form that a loss gets, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Gradients = list[torch.Tensor | None]


class _Handed(torch.autograd.Function):
    """Makes results from tensors: as in eager, results aren't leaves, so a loss may write into them."""

    @staticmethod
    def forward(ctx: Any, tensors: Sequence[torch.Tensor], gradients: Gradients, anchor: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *found: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        kept: Gradients = ctx.gradients
        for index, gradient in enumerate(found):
            known = kept[index]
            if gradient is not None:  # more than once, where the loss runs a backward itself
                kept[index] = gradient if known is None else known + gradient
        return None, None, None


def handed(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Gradients]:
    """Hands tensors to a loss.

    Returns:
        The results, and where the gradients of each will be.
    """
    gradients: Gradients = [None] * len(tensors)
    if not tensors:
        return [], gradients
    with torch.enable_grad():
        results = _Handed.apply(tensors, gradients, torch.empty(0, requires_grad=True))
    return list(results), gradients
