"""LocalGraph: the autograd graph of one block, and its backward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge

from megatrain.errors import ExecuteError
from megatrain.memory.block_image import has_strides_of


@dataclass(slots=True, eq=False)
class LocalGraph:
    """A block's own autograd graph, from leaves that stand for its inputs and state to its outputs.

    Args:
        inputs: Leaves, in the order of the template's inputs.
        state: Leaves, in the order of the template's state.
        roots: Where the gradients of outputs enter; None where an output has no history. The outputs themselves are
            free to go.
        carries: Where the gradient that later blocks left for an input enters: aliases of the inputs, made last. The
            engine runs nodes in reverse order of creation, so it is the first term of the sum, as in eager.
        saved: The tensors that autograd keeps for the backward, besides state.
    """

    inputs: list[torch.Tensor]
    state: list[torch.Tensor]
    roots: list[GradientEdge | None]
    carries: list[GradientEdge | None]
    saved: list[weakref.ref[torch.Tensor]]

    def saved_tensors(self) -> list[torch.Tensor]:
        """Returns what is saved now; what a dead branch saved is gone, and the backward frees one by one."""
        return [t for t in (ref() for ref in self.saved) if t is not None]

    def gradients(
        self, output_gradients: Sequence[torch.Tensor | None], carried: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Returns the gradients of inputs and of state; None where nothing flows.

        Args:
            output_gradients: One per output; None where the output got no gradient.
            carried: One per input: the sum that later blocks already gave it, or None.
        """
        pairs = [
            (root, gradient)
            for root, gradient in (
                *zip(self.roots, output_gradients, strict=True),
                *zip(self.carries, carried, strict=True),
            )
            if root is not None and gradient is not None
        ]
        everything = [*self.inputs, *self.state]
        leaves = [t for t in everything if t.requires_grad]
        if not pairs or not leaves:
            return [None] * len(self.inputs), [None] * len(self.state)
        roots, known = zip(*pairs, strict=True)
        try:
            found: list[torch.Tensor | None] = list(torch.autograd.grad(roots, leaves, known, allow_unused=True))
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                raise ExecuteError(OVERWRITTEN) from error
            if "on the same device" in str(error):  # all that the program computes is on one
                raise ExecuteError(_ELSEWHERE.format(str(error).splitlines()[0])) from error
            raise
        num_inputs = sum(t.requires_grad for t in self.inputs)
        for index, leaf in enumerate(leaves):  # each copy takes the place of the original at once
            found[index] = _compact(found[index]) if index < num_inputs else _as_stored(found[index], leaf)
        rest = iter(found)
        gradients = [next(rest) if t.requires_grad else None for t in everything]
        return gradients[: len(self.inputs)], gradients[len(self.inputs) :]


_ELSEWHERE = (
    "a backward that the model defines itself reads tensors of another device: {}\n"
    "  Parameters stay in host memory; on the device such a backward finds what its forward has saved.\n"
    "  Pass the parameters that the backward reads to the autograd.Function, whose forward saves them."
)
OVERWRITTEN = (
    "a tensor that the backward needs was modified in place by the model's own forward.\n"
    "  Eager autograd refuses the same model.\n"
    "  Where the forward writes into a tensor that an earlier call saved, use the call that returns a new tensor."
)


def _compact(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Copies a gradient that is a small view of a large buffer (an LSTM's are), so that the buffer is freed."""
    if gradient is None or gradient.layout != torch.strided:
        return gradient
    return gradient.clone() if gradient.untyped_storage().nbytes() > gradient.nbytes else gradient


def _as_stored(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor | None:
    """Gives a parameter's gradient its strides here, as autograd does: a transfer would take memory for that."""
    if gradient is None or gradient.dtype != parameter.dtype or has_strides_of(gradient, parameter):
        return _compact(gradient)
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)
