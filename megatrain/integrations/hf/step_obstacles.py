"""Obstacles: what keeps an update of a trainer from being one training step, in words."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megatrain.errors import DrawsError
from megatrain.integrations.paused import CallsAgainError, DifferentiatesError, PausedCall
from megatrain.tracer.arguments import Arguments, tensors_given
from megatrain.tracer.equal import is_equal


class DrawsBehindError(Exception):
    """A loss draws random numbers behind its call of the model, ahead of the next micro-batch's."""


AGAIN: dict[type[Exception], str] = {
    CallsAgainError: "the loss calls the model more than once",
    DifferentiatesError: "the loss asks for gradients that go through the model",
    DrawsError: "nothing tells ahead how many random numbers the model draws (a module runs its own code, say)",
    DrawsBehindError: "the loss draws random numbers behind its call of the model",
}
"""Errors that end a training step, whose update then runs once more as the trainer would run it."""


def reason_of(error: Exception) -> str:
    """Says in words why a training step ended; of errors other than those above, in their own."""
    return AGAIN.get(type(error)) or str(error).splitlines()[0].rstrip(".")


def obstacle_of(call: PausedCall | None) -> str | None:
    """Says why a call can't be part of a training step; None if it can."""
    if call is None:
        return "the loss doesn't call the model with gradients"
    if any(tensor.requires_grad for tensor in tensors_given(call.args, call.kwargs)):
        return "the loss gives the model an input that has gradients itself"
    return None if call.modes is None else f"the loss calls the model under {call.modes}"


def difference_between(model: nn.Module, told: tuple[tuple[Any, ...], dict[str, Any]], call: PausedCall) -> str | None:
    """Says in words how a call of a model differs from arguments that another process has told; None if it doesn't.

    Args:
        model: What is called.
        told: Positional arguments, and those by keywords.
        call: Must have the same, each tensor bit for bit.
    """
    theirs, ours = Arguments.of(model, *told), Arguments.of(model, call.args, call.kwargs)
    if theirs.layout != ours.layout:
        return "other arguments"
    for name, one, other in zip(theirs.leaf_names, theirs.leaves, ours.leaves, strict=True):
        are_tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        if not (_has_same_bits(one, other) if are_tensors else is_equal(one, other)):
            return f"another `{name}`"
    return None


def _has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    flat = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*flat)


def noted(attributes: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Each attribute, and how much it holds."""
    holders = (list, dict, set, deque)
    return {name: (value, len(value) if isinstance(value, holders) else 0) for name, value in attributes.items()}  # pyright: ignore


def is_same(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """Compares attributes and settings: plain values by value, all else by identity."""
    if len(left) != len(right):
        return False
    pairs = zip(left, right, strict=True)
    return all(one is other or (isinstance(one, int | float | str) and is_equal(one, other)) for one, other in pairs)
