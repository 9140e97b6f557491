"""CodeLosses: the losses of a training step, made by a trainer's own code, which waits at its call of the model.

Where the blocks of the model are dealt to the devices of several processes, one of them makes the losses of all
micro-batches. It runs its own trainer's code for what the other trainers were given, and looks whether that code calls
the model as theirs does.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from megatrain.compiled.module import CompiledModule
from megatrain.errors import ExecuteError
from megatrain.integrations.hf.for_losses import has_forward_replaced
from megatrain.integrations.hf.several import Several
from megatrain.integrations.hf.step_obstacles import (
    AGAIN,
    DrawsBehindError,
    difference_between,
    is_same,
    noted,
    obstacle_of,
    reason_of,
)
from megatrain.integrations.hf.whole_calls import check_streamed, gradients_of
from megatrain.integrations.paused import PausedCode
from megatrain.runtime.rng import GlobalGenerators
from megatrain.torch_private import FakeTensor, pytree
from megatrain.tracer.arguments import tensors_given
from megatrain.tracer.recording.opaque import tensors_in
from megatrain.training.batch import Differentiated, FollowingLoss, MicroBatch

Code = Callable[..., torch.Tensor]
"""The trainer's own code for one micro-batch: it calls the model, runs the backward and returns the loss."""


class _LossUnknownError(Exception):
    """A loss is made by code of which nothing is known before it runs."""


class Waiting:
    """The code of one micro-batch; pickled, it is only what the code was given.

    Args:
        rank: The process whose trainer was given the micro-batch.
        args: What the code was given.
        kwargs: The same, by keywords.

    Attributes:
        code: The trainer's, with what it was given; None in another process until that process makes the loss.
        paused: The same, where it waits.
    """

    def __init__(self, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.rank = rank
        self.args, self.kwargs = args, kwargs
        self.code: Callable[[], torch.Tensor] | None = None
        self.paused: PausedCode | None = None

    def __reduce__(self) -> Any:
        return Waiting, (self.rank, self.args, self.kwargs)


class CodeLosses(FollowingLoss):
    """Collects the micro-batches of an update, each with its code, and is the loss of their training step.

    Args:
        compiled: The model.
        several: The other processes; None if there are none.
        is_models_own: See `OneStep`.
        attributes: See `OneStep`.
        of_losses: See `OneStep`.

    Attributes:
        expected: How many micro-batches an update has here.
        waiting: Those that are there.
        losses: Of all micro-batches of all processes, behind the step.
        outside: What the optimizer trains besides the model (a loss's own parameters); set ahead of a step.
        gradients_outside: Their gradients behind the latest loss.
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
        self.waiting: list[Waiting] = []
        self.losses: Sequence[torch.Tensor] = ()
        self.outside: Sequence[torch.Tensor] = ()
        self.gradients_outside: Sequence[torch.Tensor | None] = ()
        self._compiled, self._several = compiled.megatrain, several
        self._is_models_own = is_models_own
        self._attributes = attributes
        self._of_losses = of_losses
        self._of_others: list[Waiting] = []
        self._code: Code | None = None

    @property
    def _is_dealt(self) -> bool:
        """Whether one process makes the losses of all."""
        return self._several is not None and self._several.is_dealt

    @property
    def is_one_of_many(self) -> bool:
        """Whether a micro-batch isn't the whole update."""
        return self.expected > 1 or self._several is not None

    def generators(self) -> GlobalGenerators:
        """The states of the global generators."""
        return GlobalGenerators.now(self._compiled.options.device)

    # -- ahead of a step ---------------------------------------------------------------------------------------

    def start(self, code: Code, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Runs the code of the next micro-batch up to its call of the model.

        Args:
            code: The trainer's.
            args: What it gets; where blocks are dealt, all processes get it.
            kwargs: The same, by keywords.

        Returns:
            Why the micro-batch can't be part of a training step; None if it can.
        """
        self._code = code
        # What travels is what the code was given: the code may take something out of a dictionary.
        told: Any = pytree.tree_map(_copied, (args, kwargs)) if self._is_dealt else (args, kwargs)
        self.waiting.append(waiting := Waiting(0 if self._several is None else self._several.rank, *told))
        return self._started(waiting, code, args, kwargs)

    def batches(self) -> list[MicroBatch]:
        """The micro-batches that wait."""
        found: list[MicroBatch] = []
        for each in self.waiting:
            assert each.paused is not None
            assert each.paused.call is not None
            found.append(MicroBatch(each, each.paused.call.args, each.paused.call.kwargs))
        return found

    def get_ready(self, batches: Sequence[MicroBatch]) -> None:
        """Starts the code for micro-batches of other processes, whose losses are made here.

        Raises:
            ExecuteError: If it can't be part of a training step, or calls the model otherwise than in its own process.
        """
        for batch in batches:
            waiting: Waiting = batch.given
            if waiting.paused is not None:
                continue
            assert self._several is not None
            assert self._code is not None
            self._of_others.append(waiting)
            if (obstacle := self._started(waiting, self._code, waiting.args, waiting.kwargs)) is not None:
                self._several.refuse_apart(obstacle)
            self._check_alike(waiting, batch)

    def _check_alike(self, waiting: Waiting, batch: MicroBatch) -> None:
        paused: Any = waiting.paused
        difference = difference_between(self._compiled.model, (batch.args, dict(batch.kwargs)), paused.call)
        if difference is not None:
            raise ExecuteError(
                f"the code ahead of the call gives the model {difference} for a micro-batch of rank "
                f"{waiting.rank} here than there.\n"
                '  With across_devices="round" one process makes the losses of all micro-batches, by its own code.\n'
                "  Let that code depend on what it is given alone, not on the process, the clock or random numbers.\n"
                '  Train with across_devices="replicate" otherwise.'
            )

    def _started(self, waiting: Waiting, code: Code, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        before, attributes = self.generators(), noted(self._attributes)
        gradients, versions = gradients_of(self._compiled), _versions(args, kwargs)
        waiting.code = partial(code, *args, **kwargs)
        behind = nullcontext if self._several is None else self._several.no_collectives
        run = partial(_within, behind, waiting.code) if self._is_dealt else waiting.code
        waiting.paused = paused = PausedCode(self._compiled, run, behind)
        paused.start()
        if paused.call is None:
            check_streamed(self._compiled, gradients)
        obstacle = obstacle_of(paused.call)
        if obstacle is None and (self.expected > 1 or self._is_dealt):
            now = noted(self._attributes)
            changed = [name for name in now if name not in attributes or not is_same(attributes[name], now[name])]
            if has_forward_replaced(self._of_losses):
                obstacle = "the loss replaces the model's forward around its call"
            elif changed:
                obstacle = f"the code ahead of the call of the model changes `{changed[0]}` of the trainer"
        if obstacle is None and self.is_one_of_many and not before.is_same(self.generators()):
            obstacle = "the loss draws random numbers before it calls the model"
        if obstacle is None and self._is_dealt and versions != _versions(args, kwargs):
            obstacle = "the code ahead of the call of the model writes into tensors that it is given"
        return obstacle

    # -- within a step, and behind it --------------------------------------------------------------------------

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
        loss = self._made(given.paused, result)
        if self.is_one_of_many and not before.is_same(self.generators()):
            raise DrawsBehindError
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

    def abandon(self) -> list[Waiting]:
        """Ends code that waits: its update doesn't come, or another process makes its losses.

        Returns:
            The micro-batches of this process that were there.
        """
        waiting, self.waiting = self.waiting, []
        others, self._of_others = self._of_others, []
        for each in (*waiting, *others):
            if each.paused is not None:
                each.paused.abandon()
        return waiting

    def run_alone(self) -> list[torch.Tensor]:
        """Runs the micro-batches that wait, each by itself; returns their losses."""
        waiting, self.waiting = self.waiting, []
        return [each.paused.run_alone() for each in waiting if each.paused is not None]


def _within(context: Callable[[], AbstractContextManager[object]], code: Callable[[], torch.Tensor]) -> torch.Tensor:
    with context():
        return code()


def _copied(leaf: Any) -> Any:
    return copy.copy(leaf) if isinstance(leaf, UserDict) else leaf  # pyright: ignore[reportUnknownVariableType]


def _versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """How often each tensor was written."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors_given(args, kwargs)]
