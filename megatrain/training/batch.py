"""MicroBatch: the arguments of a training step, and the loss of a result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatrain.errors import ExecuteError
from megatrain.passes.rewrites.loss_only import own_loss
from megatrain.planning.loss_bytes import Loss
from megatrain.tracer.arguments import Arguments


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The arguments of one call of the model.

    Args:
        given: As the caller gave it.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    given: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @staticmethod
    def of(given: Any) -> MicroBatch:
        """Reads a mapping as keyword arguments, a tuple as positional ones, any other value as the only argument."""
        if isinstance(given, MicroBatch):
            return given
        if isinstance(given, Mapping):
            return MicroBatch(given, (), {str(key): value for key, value in given.items()})  # pyright: ignore
        if isinstance(given, tuple):
            return MicroBatch(given, given, {})  # pyright: ignore[reportUnknownArgumentType]
        return MicroBatch(given, (given,), {})


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A loss whose backward has run already, through the model's result, in the code that made the loss.

    Args:
        loss: The loss, detached; its share of the step's loss is all of it.
    """

    loss: torch.Tensor


class FollowingLoss(ABC):
    """A loss that follows steps: what makes it hears all losses after each."""

    @abstractmethod
    def __call__(self, result: Any, given: Any) -> Any:
        """Makes the loss of one micro-batch, as any `loss=` does."""

    @abstractmethod
    def hear(self, losses: Sequence[torch.Tensor]) -> None:
        """A step is over.

        Args:
            losses: Of all micro-batches of all ranks, in the order of their sum; on the host if there are other ranks.
        """


def micro_batches(batch: Any) -> list[MicroBatch]:
    """Reads the argument of a step: a list holds micro-batches, any other value is one micro-batch.

    Raises:
        ExecuteError: If there are none.
    """
    if not isinstance(batch, list):
        return [MicroBatch.of(batch)]
    if not batch:
        raise ExecuteError(
            "a step was called with an empty list.\n  A list holds the micro-batches of the step, at least one.\n"
            "  Leave out steps without data."
        )
    return [MicroBatch.of(given) for given in batch]  # pyright: ignore[reportUnknownVariableType]


def untrained(model: nn.Module, batch: MicroBatch) -> Arguments:
    """Returns the arguments of a micro-batch, flattened.

    Raises:
        ExecuteError: If a backward would give one of them a gradient.
    """
    arguments = Arguments.of(model, batch.args, dict(batch.kwargs))
    for name, tensor in zip(arguments.names, arguments.tensors, strict=True):
        if tensor.requires_grad:
            raise ExecuteError(
                f"input `{name}` requires grad.\n"
                "  A step trains the parameters of the model; the gradient of an input would be lost.\n"
                "  Detach the input, or make it a parameter of the model to train it."
            )
    return arguments


def loss_of(result: Any, batch: MicroBatch, loss: Loss | None) -> torch.Tensor | Differentiated:
    """Makes the loss of one micro-batch: by the user's function, or the model's own.

    Raises:
        ExecuteError: If there is none, or it isn't one number.
    """
    if loss is not None:
        found: Any = loss(result, batch.given)
        origin = "loss= returned"
    else:
        found = own_loss(result)
        origin = "the model returned"
    if isinstance(found, Differentiated):
        return found
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        shape = f" of shape {list(found.shape)}" if isinstance(found, torch.Tensor) else ""
        raise ExecuteError(
            f"{origin} a {type(found).__name__}{shape}, which isn't a loss.\n"
            "  A step differentiates one number: the result itself, its `loss`, or the result of `loss=`.\n"
            "  Give TrainStep(loss=lambda result, batch: ...), or pass the model its labels."
        )
    return found
