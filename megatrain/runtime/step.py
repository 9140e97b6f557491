"""Joins a call of the compiled model to the caller's autograd graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatrain.runtime.executor import Executor


class _Step(torch.autograd.Function):
    """One node for the whole model: forward runs the forward half of the schedule, backward the other half."""

    @staticmethod
    def forward(ctx: Any, executor: Executor, inputs: Sequence[torch.Tensor], outputs: list[Any], *_: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.executor = executor.forward(inputs), executor
        # The call must not keep its outputs: they will keep this node, and the node keeps the call.
        outputs += ctx.call.take_outputs()
        return tuple(outputs[i] for i in executor.differentiable_outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        executor: Executor = ctx.executor
        everything: list[torch.Tensor | None] = [None] * len(executor.program.outputs)
        for index, gradient in zip(executor.differentiable_outputs, gradients, strict=True):
            everything[index] = gradient
        return None, None, None, None, *executor.backward(ctx.call, everything)


def run_step(executor: Executor, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Runs one call; what it returns is differentiable where the model's own outputs would be.

    Args:
        executor: For this signature of inputs.
        inputs: The model's tensor inputs, in order.

    Returns:
        The tensors of the model's output, in order.
    """
    if not (torch.is_grad_enabled() and executor.differentiable_outputs):
        call = executor.forward(inputs)
        outputs = call.take_outputs()
        executor.forget(call)
        return outputs
    outputs: list[torch.Tensor] = []
    anchor = torch.empty(0, requires_grad=True)
    anchors = [inputs[i] for i in executor.differentiable_inputs]
    found = _Step.apply(executor, inputs, outputs, anchor, *anchors)
    for index, output in zip(executor.differentiable_outputs, found, strict=True):
        outputs[index] = output
    return outputs
