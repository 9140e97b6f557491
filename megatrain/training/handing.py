"""Handing: the model's results in the form that a loss gets, their gradients, and the loss as a step returns it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatrain.errors import ExecuteError

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


def spent(loss: torch.Tensor) -> torch.Tensor:
    """Returns the loss of a step, whose `backward` says that the step has run it; saved or copied it is like any."""
    vars(loss).update(backward=_refuse_backward, __getstate__=dict)
    return loss


def _refuse_backward(*_: object, **__: object) -> None:
    raise ExecuteError(
        "the training step that returned this loss has run its backward.\n"
        "  A TrainStep runs forward, backward, clipping and the update in its one call.\n"
        "  Leave out backward(), clip_grad_norm_() and optimizer.step(); clip with TrainStep(max_grad_norm=)."
    )
