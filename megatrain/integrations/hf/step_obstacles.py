"""Obstacles: what keeps an update of a trainer from being one training step, in words."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from megatrain.errors import DrawsError
from megatrain.integrations.paused import CallsAgainError, DifferentiatesError, PausedCall
from megatrain.tracer.arguments import tensors_given
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
