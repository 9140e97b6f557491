"""Demand: where the caller's backward wants each parameter's gradient; the only file that asks autograd's engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from megatrain import torch_private
from megatrain.errors import ExecuteError
from megatrain.passes.interpret import looks_in_backward
from megatrain.passes.program import Program
from megatrain.runtime.gradients.sink import Take, accumulate, is_hooked, keeps_gradient, keeps_of, warn_of_order


def keeps_graph() -> bool:
    """Tells, inside a backward, whether it was called with `retain_graph`."""
    return bool(torch_private.keeps_graph())


class Demand:
    """Sends each parameter's gradient where the backward that is running wants it.

    `loss.backward()` wants gradients in `.grad`: they are added there one by one, as they arrive. A gradient with hooks
    waiting for it, and one that `torch.autograd.grad` asked for, go back to the engine instead: it runs hooks once, on
    the sum over all calls of the model. `backward(inputs=...)` leaves the others alone.

    Args:
        keys: Of the parameters.
        parameters: The tensors themselves.
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
        """Returns the gradients for the engine, one per parameter.

        Raises:
            ExecuteError: If a parameter with hooks got no gradient: the engine would run its hooks all the same.
        """
        for key in self._hooked:
            if self._returned[key] is None:
                raise ExecuteError(
                    f"parameter `{key}` has a hook, but this backward has no gradient for it.\n"
                    "  In eager its hooks would not run; in a compiled model they would run, without a gradient.\n"
                    "  Remove the hook, or differentiate the outputs that depend on the parameter as well."
                )
        return [self._returned.get(key) for key in self._keys]


class Once:
    """Hands each parameter's gradient on once: a backward that is repeated makes those again that came before.

    Attributes:
        keeps: See `Take`.
    """

    def __init__(self, take: Take):
        self._take = take
        self.keeps = keeps_of(take)
        self._known: set[str] = set()

    def __call__(self, key: str, gradient: torch.Tensor) -> None:
        """See `Take`."""
        if key not in self._known:
            self._take(key, gradient)
            self._known.add(key)


def _is_captured(node: Any) -> bool:
    """Tells whether `torch.autograd.grad` asked for the gradient of this leaf; the engine says so by an error."""
    try:
        torch_private.will_execute_node(node)
    except RuntimeError:
        return True
    return False
