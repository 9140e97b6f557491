"""linear_into(): a linear layer whose backward adds the gradients of its weights to sums."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatrain.passes.rewrites.gradient_sum import GradientSum


def linear_into(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    of_weight: GradientSum | None,
    of_bias: GradientSum | None,
    is_unread: bool,
) -> torch.Tensor:
    """Computes `F.linear(x, weight, bias)`, with a gradient for `x` alone.

    Args:
        x: Floating point, of shape [..., inner].
        weight: Of shape [outer, inner].
        bias: Of shape [outer], or None.
        of_weight: Takes the gradient of the weight; None if nobody needs it.
        of_bias: Likewise that of the bias.
        is_unread: Nobody reads the values of the result, so that they aren't computed.
    """
    return _LinearInto.apply(x, weight, bias, (of_weight, of_bias), is_unread)  # pyright: ignore[reportReturnType]


class _LinearInto(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sums: tuple[GradientSum | None, GradientSum | None],
        is_unread: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sums = sums
        return x.new_empty((*x.shape[:-1], weight.shape[0])) if is_unread else F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator's type
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_weight, of_bias = ctx.sums
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_x = rows.mm(weight).view(x.shape) if ctx.needs_input_grad[0] else None
        if of_weight is not None:
            of_weight.add_product(rows.t(), x.reshape(-1, x.shape[-1]))
        if of_bias is not None:
            of_bias.add_rows(rows)
        return of_x, None, None, None, None
