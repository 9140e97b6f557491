"""Joins a call of the compiled model to the caller's autograd graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from megatrain.base import torch_private
from megatrain.errors import ExecuteError
from megatrain.passes.interpret import looks_in_backward
from megatrain.passes.program import Program
from megatrain.runtime.accumulation import accumulate, is_hooked, keeps_gradient, warn_of_order
from megatrain.runtime.executor import Executor


def keeps_graph() -> bool:
    """Tells, inside a backward, whether it was called with `retain_graph`."""
    return bool(torch_private.keeps_graph())


class Demand:
    """Sends each parameter's gradient where the backward that is running wants it.

    `loss.backward()` wants gradients in `.grad`: they are added there one by one, as they arrive. A gradient with hooks
    waiting for it, and one that `torch.autograd.grad` asked for, go back to the engine instead: it runs hooks once, on
    the sum over all calls of the model. `backward(inputs=...)` leaves the others alone.

    Args:
        nodes: Their nodes in the caller's graph, one each.
        program: What runs; it has the order of eager's gradients.
    """

    def __init__(
        self,
        keys: Sequence[str],
        parameters: Sequence[torch.Tensor],
        nodes: Sequence[Any],
        program: Program,
    ):
        self._keys = keys
        self._own: dict[str, torch.Tensor] = {}
        self._hooked: set[str] = set()
        self._returned: dict[str, torch.Tensor | None] = {}
        for key, parameter, node in zip(keys, parameters, nodes, strict=True):
            if not parameter.is_leaf or _is_captured(node):
                self._returned[key] = None
            elif not torch_private.will_execute_node(node) or not parameter.requires_grad:
                continue
            elif is_hooked(parameter):
                self._returned[key] = None
                self._hooked.add(key)
            else:
                self._own[key] = parameter
        in_backward = partial(any, (looks_in_backward(template.graph) for template in program.templates.values()))
        warn_of_order(program.gradient_order, self._hooked.__contains__, in_backward)

    def keeps(self, key: str) -> bool:
        """Tells whether somebody will keep the memory of a parameter's gradient."""
        return keeps_gradient(self._own[key]) if key in self._own else key in self._returned

    def __call__(self, key: str, gradient: torch.Tensor) -> None:
        """Takes the whole gradient of a parameter; runs on the stream that brings it to the host."""
        if key in self._own:
            accumulate(self._own[key], gradient)
        elif key in self._returned:
            self._returned[key] = gradient

    def returned(self) -> list[torch.Tensor | None]:
        """Returns the gradients for the engine; an ExecuteError for hooks that it would run without one."""
        for key in self._hooked:
            if self._returned[key] is None:
                raise ExecuteError(
                    f"parameter `{key}` has a hook, but this backward has no gradient for it.\n"
                    "  In eager its hooks would not run; in a compiled model they would run, without a gradient.\n"
                    "  Remove the hook, or differentiate the outputs that depend on the parameter as well."
                )
        return [self._returned.get(key) for key in self._keys]


def _is_captured(node: Any) -> bool:
    """Tells whether `torch.autograd.grad` asked for the gradient of this leaf; the engine says so by an error."""
    try:
        torch_private.will_execute_node(node)
    except RuntimeError:
        return True
    return False


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
        return tuple(outputs[i] for i in executor.facts.differentiable_outputs)

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
        for index, gradient in zip(executor.facts.differentiable_outputs, gradients, strict=True):
            everything[index] = gradient
        aliases = [node for node, _ in ctx.next_functions[-len(ctx.parameters) :]] if ctx.parameters else []
        nodes = [None if node is None else node.next_functions[0][0] for node in aliases]
        demand = Demand(executor.facts.trained, ctx.parameters, nodes, executor.program)
        found = executor.backward(ctx.call, everything, keep_graph=keeps_graph(), take=demand)
        return None, None, None, None, None, *found, *demand.returned()


def run_step(executor: Executor, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Runs one call; its results are differentiable where the model's own outputs would be."""
    is_joined = torch.is_grad_enabled() and bool(executor.facts.differentiable_outputs)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_joined):
        call = executor.forward(inputs)
    # The call must not keep its outputs: they will keep its node, and the node keeps the call.
    outputs = call.take_outputs()
    if not is_joined:
        call.forget()
        return executor.handed_through(inputs, outputs)
    anchor = torch.empty(0, requires_grad=True)
    # Not before the forward: memory that somebody else holds stays where it is, and the aliases would hold it.
    parameters = executor.parameters()
    # Aliases, so that accumulations, and hooks on these, run in the order of the parameters: the engine has no order
    # among accumulations that one node makes ready. It runs the aliases' nodes in reverse order of creation, and after
    # each the accumulation that waits for it. On a device another thread hands it the nodes one by one, in the order of
    # the node's operands: that order is the same, so the nodes that it has are always the first.
    aliases = [torch.ops.aten.alias.default(parameter) for parameter in reversed(parameters)][::-1]
    sources = [*(inputs[i] for i in executor.facts.differentiable_inputs), *aliases]
    found = _CallNode.apply(executor, call, outputs, parameters, anchor, *sources)
    results = executor.handed_through(inputs, outputs)
    for i, tensor in zip(executor.facts.differentiable_outputs, found, strict=True):
        results[i] = tensor
    return results


_CREATE_GRAPH = (
    "backward ran with create_graph=True.\n"
    "  A compiled model has first derivatives only: its backward is a schedule, and autograd can't differentiate a "
    "schedule.\n"
    "  Leave out create_graph, or compute second derivatives with the model itself, uncompiled."
)
