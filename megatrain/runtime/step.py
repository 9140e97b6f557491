"""Joins a call of the compiled model to the caller's autograd graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatrain.runtime.executor import Call, Executor


class _Step(torch.autograd.Function):
    """One node for the whole model: forward runs the forward half of the schedule, backward the other half."""

    @staticmethod
    def forward(ctx: Any, executor: Executor, inputs: Sequence[torch.Tensor], box: list[Call], *anchors: Any) -> Any:
        ctx.set_materialize_grads(False)
        call = executor.forward(inputs)
        box.append(call)
        ctx.call, ctx.executor = call, executor
        return tuple(call.outputs[i] for i in executor.differentiable_outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        executor, call = ctx.executor, ctx.call
        everything: list[torch.Tensor | None] = [None] * len(call.outputs)
        for index, gradient in zip(executor.differentiable_outputs, gradients, strict=True):
            everything[index] = gradient
        return None, None, None, None, *executor.backward(call, everything)


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
        outputs = call.outputs
        executor.forget(call)
        return outputs
    box: list[Call] = []
    anchor = torch.empty(0, requires_grad=True)
    anchors = [inputs[i] for i in executor.differentiable_inputs]
    found = _Step.apply(executor, inputs, box, anchor, *anchors)
    outputs = list(box[0].outputs)
    for index, output in zip(executor.differentiable_outputs, found, strict=True):
        outputs[index] = output
    return outputs
