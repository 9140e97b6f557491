"""MicroBatch: the arguments of a training step, and the loss of a result."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatrain.base.checks import shown
from megatrain.device import is_on_host
from megatrain.errors import ExecuteError, OptionError
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

    @property
    def values(self) -> Sequence[Any]:
        """All arguments."""
        return (*self.args, *self.kwargs.values())

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


Weight = Callable[[Any], Any]
"""Says how much a micro-batch counts: a number, or a tensor with one element."""


def check_reduce(reduce: str, weight: Weight | None) -> None:
    """Checks that weights aren't given for a sum.

    Raises:
        OptionError: If they are.
    """
    if weight is not None and reduce == "sum":
        raise OptionError(
            'weight= was given with reduce="sum".\n  Weights are shares of a mean; a sum takes every loss whole.\n'
            "  Multiply by the weight in loss=, or leave one of the two out."
        )


class Counts:
    """How much each micro-batch of this process counts.

    Args:
        batches: The micro-batches.
        weight: Counts each; None lets all count the same.
        is_sum: Losses are added up as they are.
    """

    def __init__(self, batches: Sequence[MicroBatch], weight: Weight | None, *, is_sum: bool = False) -> None:
        self.found: list[Any] = [1] * len(batches) if weight is None else [weight(batch.given) for batch in batches]
        self.is_sum = is_sum

    def said(self) -> dict[str, Any]:
        """The counts as other ranks get them; waits for the device if they are there."""
        return {"counts": [_number_of(count) for count in self.found], "micro_batches": len(self.found)}


class Shares:
    """The factors of the micro-batches' losses; those of all ranks add up to 1, or all are 1.

    Counts that are on the device stay there: to read them here, the launching thread would have to wait. Then `check`
    reads them, on another thread, before anything is updated.

    Args:
        counts: How much each micro-batch counts.
        others: What all ranks `said`, this one included; None if there are no others.
        rank: This one.

    Raises:
        OptionError: If counts on the host aren't finite and positive in sum, or a count is no number.

    Attributes:
        fault: What `check` raised.
    """

    def __init__(self, counts: Counts, *, others: Sequence[Mapping[str, Any]] | None = None, rank: int = 0) -> None:
        found = counts.found
        self.fault: OptionError | None = None
        self._unread: torch.Tensor | None = None
        self._factors: Sequence[float | torch.Tensor]
        if counts.is_sum:
            self._factors = [1.0] * len(found)
        elif others is not None:
            by_rank: list[list[float]] = [each["counts"] for each in others]
            total = _checked_sum([number for numbers in by_rank for number in numbers])
            self._factors = [number / total for number in by_rank[rank]]
        elif _are_on_device(found):
            self._unread = torch.stack([count.detach().reshape(()).double() for count in found])
            on_device = self._unread.unbind()
            total = functools.reduce(torch.add, on_device)
            self._factors = [1.0] if len(on_device) == 1 else [count / total for count in on_device]
        else:
            numbers = [_number_of(count) for count in found]
            total = _checked_sum(numbers)
            self._factors = [number / total for number in numbers]

    def check(self) -> None:
        """Reads counts that are on the device, if nobody did; waits for the calling thread's current stream.

        Raises:
            OptionError: If they aren't finite and positive in sum.
        """
        if self._unread is None:
            return
        try:
            _checked_sum(self._unread.tolist())
        except OptionError as error:
            self.fault = error
            raise
        self._unread = None

    def share(self, loss: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """Returns a micro-batch's loss times its factor."""
        factor = self._factors[micro_batch]
        if isinstance(factor, torch.Tensor):
            # As with a number, the product is computed in fp32 at least, and has the dtype of the loss.
            dtype = torch.promote_types(loss.dtype, torch.float32)
            return (loss.to(dtype) * factor.to(loss.device, dtype)).to(loss.dtype)
        return loss if factor == 1.0 else loss * factor


def _are_on_device(counts: Sequence[Any]) -> bool:
    tensors = [count for count in counts if isinstance(count, torch.Tensor) and count.numel() == 1]
    is_same = len({tensor.device for tensor in tensors}) == 1 and not any(tensor.is_complex() for tensor in tensors)
    return len(tensors) == len(counts) and is_same and not is_on_host(tensors[0])


def _number_of(count: Any) -> float:
    try:
        return float(count)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(
            f"weight= counts a micro-batch as {shown(count)}.\n  A count is a number, or a tensor with one element.\n"
            "  Return for example the number of targets."
        ) from error


def _checked_sum(counts: list[float]) -> float:
    total = sum(counts)
    if min(counts) < 0 or not 0 < total < float("inf"):
        raise OptionError(
            f"weight= counts the micro-batches as {counts}.\n  The loss is an average weighted by these numbers.\n"
            "  Count the items that each loss averages over, such as the targets that aren't ignored."
        )
    return total
