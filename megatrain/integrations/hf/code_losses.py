"""CodeLosses: the losses of a training step, made by a trainer's own code, which waits at its call of the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from megatrain.base.torch_private import FakeTensor
from megatrain.errors import DrawsError
from megatrain.integrations.hf.several import Several
from megatrain.integrations.hf.whole_calls import check_streamed, gradients_of, has_forward_replaced
from megatrain.integrations.paused import CallsAgainError, DifferentiatesError, PausedCall, PausedCode
from megatrain.runtime.random_calls import RngState
from megatrain.tracer.arguments import tensors_given
from megatrain.tracer.recording.opaque import tensors_in
from megatrain.tracer.spec import is_equal
from megatrain.training.batch import Differentiated, FollowingLoss, MicroBatch
from megatrain.training.compiled.module import CompiledModule


class DrawsAfterError(Exception):
    """A loss draws random numbers after its call of the model, before the next micro-batch's."""


AGAIN: dict[type[Exception], str] = {
    CallsAgainError: "the loss calls the model more than once",
    DifferentiatesError: "the loss asks for gradients that go through the model",
    DrawsError: "nothing says beforehand how many random numbers the model draws (a module runs its own code, say)",
    DrawsAfterError: "the loss draws random numbers after its call of the model",
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


Code = Callable[..., torch.Tensor]
"""The trainer's own code for one micro-batch: it calls the model, runs the backward and returns the loss."""


class _LossUnknownError(Exception):
    """A loss is made by code of which nothing is known before it runs."""


class CodeLosses(FollowingLoss):
    """Collects the micro-batches of an update, each with its code, and is the loss of their training step.

    Attributes:
        expected: How many micro-batches an update has here.
        waiting: Those that are there.
        losses: Of all micro-batches of all processes, after the step.
        outside: What the optimizer trains besides the model (a loss's own parameters); set before a step.
        gradients_outside: Their gradients after the latest loss.
    """

    def __init__(
        self,
        compiled: CompiledModule,
        several: Several | None,
        is_models_own: Callable[[], bool],
        attributes: Mapping[str, Any],
        of_losses: CompiledModule,
    ) -> None:
        self.expected = 1
        self.waiting: list[PausedCode] = []
        self.losses: Sequence[torch.Tensor] = ()
        self.outside: Sequence[torch.Tensor] = ()
        self.gradients_outside: Sequence[torch.Tensor | None] = ()
        self._compiled, self._several = compiled.megatrain, several
        self._is_models_own = is_models_own
        self._attributes = attributes
        self._of_losses = of_losses

    @property
    def is_one_of_many(self) -> bool:
        """Whether a micro-batch isn't the whole update."""
        return self.expected > 1 or self._several is not None

    def generators(self) -> RngState:
        """The states of the global generators."""
        return RngState.of_all(self._compiled.options.device)

    # -- before a step ----------------------------------------------------------------------------------------

    def start(self, code: Code, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Runs the code of the next micro-batch up to its call of the model.

        Returns:
            Why the micro-batch can't be part of a training step; None if it can.
        """
        before, attributes = self.generators(), noted(self._attributes)
        gradients = gradients_of(self._compiled)
        after = nullcontext if self._several is None else self._several.no_collectives
        paused = PausedCode(self._compiled, partial(code, *args, **kwargs), after)
        self.waiting.append(paused)
        paused.start()
        if paused.call is None:
            check_streamed(self._compiled, gradients)
        obstacle = obstacle_of(paused.call)
        if obstacle is None and self.expected > 1:
            now = noted(self._attributes)
            changed = [name for name in now if name not in attributes or not is_same(attributes[name], now[name])]
            if has_forward_replaced(self._of_losses):
                obstacle = "the loss replaces the model's forward around its call"
            elif changed:
                obstacle = f"the code before the call of the model changes `{changed[0]}` of the trainer"
        if obstacle is None and self.is_one_of_many and not before.is_same(self.generators()):
            obstacle = "the loss draws random numbers before it calls the model"
        return obstacle

    def batches(self) -> list[MicroBatch]:
        """The micro-batches that wait."""
        calls = [(each, each.call) for each in self.waiting]
        return [MicroBatch(each, call.args, call.kwargs) for each, call in calls if call is not None]

    # -- within a step, and after it ----------------------------------------------------------------------------

    def __call__(self, result: Any, given: Any) -> Any:
        """Has the code of a micro-batch go on with the result of its call.

        Raises:
            ExecuteError: With several processes, if its update can't be one training step.
        """
        if any(isinstance(tensor, FakeTensor) for tensor in tensors_in(result)):
            if not self._is_models_own():
                raise _LossUnknownError
            return result["loss"] if isinstance(result, dict) else result[0]
        before = self.generators()
        loss = self._made(given, result)
        if self.is_one_of_many and not before.is_same(self.generators()):
            raise DrawsAfterError
        self.gradients_outside = [p.grad for p in self.outside]
        return Differentiated(loss)

    def _made(self, paused: PausedCode, result: Any) -> torch.Tensor:
        """Has waiting code make its loss of a result; returns the loss as its part of the sum."""
        if self._several is None:
            return paused.give(result)
        try:
            return paused.give(result) / self._several.size
        except tuple(AGAIN) as error:  # here, so that the other processes hear the reason
            self._several.refuse_apart(reason_of(error), error)

    def hear(self, losses: Sequence[torch.Tensor]) -> None:
        """Keeps the losses of all processes, on the device."""
        place = self._compiled.options.device.torch_device
        self.losses = losses if self._several is None else [loss.to(place) for loss in losses]

    def abandon(self) -> list[PausedCode]:
        """Ends code that waits, because its update doesn't come; returns what waited."""
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            each.abandon()
        return waiting

    def run_alone(self) -> list[torch.Tensor]:
        """Runs the micro-batches that wait, each by itself; returns their losses."""
        waiting, self.waiting = self.waiting, []
        return [each.run_alone() for each in waiting]
