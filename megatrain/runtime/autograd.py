"""Joins a call of the compiled model to the caller's autograd graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatrain.device import is_on_host
from megatrain.errors import ExecuteError
from megatrain.runtime.executor import Executor
from megatrain.runtime.gradients.sink import Demand, keeps_graph


class _CallNode(torch.autograd.Function):
    """One node for the whole model: forward runs the forward half of the schedule, backward the other half."""

    @staticmethod
    def forward(
        ctx: Any,
        executor: Executor,
        call: Any,
        outputs: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        *sources: torch.Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.executor, ctx.parameters = call, executor, parameters
        return tuple(outputs[i] for i in executor.differentiable_outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        executor: Executor = ctx.executor
        if torch.is_grad_enabled():
            raise ExecuteError(_CREATE_GRAPH)
        if executor.engine.why_no_backward:
            raise ExecuteError(executor.engine.why_no_backward)
        if all(gradient is None for gradient in gradients):
            return tuple(None for _ in range(4 + len(ctx.next_functions)))
        everything: list[torch.Tensor | None] = [None] * len(executor.program.outputs)
        for index, gradient in zip(executor.differentiable_outputs, gradients, strict=True):
            everything[index] = gradient
        aliases = [node for node, _ in ctx.next_functions[-len(ctx.parameters) :]] if ctx.parameters else []
        nodes = [None if node is None else node.next_functions[0][0] for node in aliases]
        demand = Demand(executor.facts.trained, ctx.parameters, nodes, executor.program)
        found = executor.backward(ctx.call, everything, keep_graph=keeps_graph(), take=demand)
        return None, None, None, None, None, *found, *demand.returned()


def run_step(executor: Executor, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Runs one call; its results are differentiable where the model's own outputs would be.

    Args:
        executor: For this signature of inputs.
        inputs: The model's tensor inputs, in order.

    Returns:
        The tensors of the model's output, in order.
    """
    outputs: list[torch.Tensor] = []
    if torch.is_grad_enabled() and executor.differentiable_outputs:
        anchor = torch.empty(0, requires_grad=True)
        sources = [inputs[i] for i in executor.differentiable_inputs]
        with torch.no_grad():
            call = executor.forward(inputs)
        # The call must not keep its outputs: they will keep its node, and the node keeps the call.
        outputs += call.take_outputs()
        parameters = executor.parameters()
        # Not before the forward: memory that somebody else holds stays where it is, and the aliases would hold it.
        sources += _ordered_aliases(parameters)
        found = _CallNode.apply(executor, call, outputs, parameters, anchor, *sources)
        differentiable = dict(zip(executor.differentiable_outputs, found, strict=True))
    else:
        call = executor.forward(inputs)
        outputs += call.take_outputs()
        call.forget()
        differentiable = {}
    return [differentiable.get(i, tensor) for i, tensor in enumerate(_handed_through(executor, inputs, outputs))]


def _ordered_aliases(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Makes an alias of each parameter, so that their accumulations, and hooks on these, run in the given order.

    The engine has no order among accumulations that one node makes ready. It runs the aliases' nodes in reverse order
    of creation, and after each the accumulation that waits for it. On a device another thread hands it the nodes one by
    one, in the order of the node's operands: that order is the same, so the nodes that it has are always the first.
    """
    return [torch.ops.aten.alias.default(parameter) for parameter in reversed(parameters)][::-1]


def _handed_through(
    executor: Executor, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Puts the caller's own tensor where the model returns an input, and the model's where it returns its state."""
    program = executor.program
    own = dict(zip(program.inputs, inputs, strict=True))
    if is_on_host(program.device):  # elsewhere a buffer that was written is a copy on the device
        own |= {name: executor.state_output(key) for name, key in executor.facts.returned_buffers.items()}
    for ref, output in zip(program.outputs, outputs, strict=True):
        yield executor.state_output(ref.name) if ref.kind == "state" else own.get(ref.name, output)


_CREATE_GRAPH = (
    "backward ran with create_graph=True.\n"
    "  A compiled model has first derivatives only: its backward is a schedule, and autograd can't differentiate a "
    "schedule.\n"
    "  Leave out create_graph, or compute second derivatives with the model itself, uncompiled."
)
