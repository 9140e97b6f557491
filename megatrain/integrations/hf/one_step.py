"""OneStep: all micro-batches of a trainer's update as one training step of megatrain."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from megatrain.base.host_limits import available_bytes
from megatrain.base.sizes import format_bytes
from megatrain.errors import (
    ExecuteError,
    MicroBatchError,
    OptimizerError,
    ReadsParameterError,
    ScheduleError,
    StreamedCallsWarning,
)
from megatrain.integrations.hf.code_losses import AGAIN, Code, CodeLosses, is_same, reason_of
from megatrain.integrations.hf.several import Several
from megatrain.integrations.hf.whole_calls import streaming_code
from megatrain.integrations.paused import SpentError
from megatrain.optim.block_update import MasterStep
from megatrain.optim.blockwise import BlockOptimizer
from megatrain.runtime.random_calls import RngState
from megatrain.tracer.arguments import Arguments
from megatrain.training.batch import MicroBatch
from megatrain.training.compiled.module import CompiledModule
from megatrain.training.step import TrainStep


class OneStep:
    """Collects the micro-batches of an update, and takes them in one training step.

    What can't be one training step runs as the trainer would run it, with a model whose calls stream: each call brings
    the weights anew, and the update follows on the host. A warning says so, and why, once. With several processes this
    is refused: gradients go from process to process within a training step.

    Args:
        make_step: Makes the training step for a loss.
        settings: What `make_step` reads: an optimizer, and plain values. If these change, it makes another.
        is_models_own: Tells whether the loss is the one that the model returns, so that it takes no memory of its own.
        attributes: The trainer's attributes. Code that sets one before its call of the model would find the value of
            the last micro-batch after the call.
        of_losses: The model as losses hold it. Code that replaces its `forward` around the call would find the
            replacement of another micro-batch.

    Attributes:
        several: The other processes that train the model; None if there are none.
        step: The training step; None before the first, and if there can be none.
        reason: Why updates aren't training steps; None if they are.
        has_updated: The update was taken within the training step, and the trainer's own has nothing left to do.
        longest: How many tokens the longest row of the data has, and how many rows are flattened into one; a step of
            that length is planned before the first. None if nobody knows, or without `lengths`.
        evaluates: The model is evaluated between updates, which the host must have room for.
    """

    def __init__(
        self,
        compiled: CompiledModule,
        make_step: Callable[[Callable[[Any, Any], Any]], TrainStep],
        settings: Callable[[], tuple[Any, ...]],
        is_models_own: Callable[[], bool],
        attributes: Mapping[str, Any],
        of_losses: CompiledModule,
    ) -> None:
        self.step: TrainStep | None = None
        self.reason: str | None = None
        self.has_updated = False
        self.longest: tuple[int, int] | None = None
        self.evaluates = False
        self.compiled = compiled
        ranks = compiled.megatrain.ranks
        self.several = None if ranks is None else Several(ranks)
        self._make_step = make_step
        self._settings = settings
        self._made_for: tuple[Any, ...] = ()
        self._losses = CodeLosses(compiled, self.several, is_models_own, attributes, of_losses)
        self._has_none = False
        self._said: set[str] = set()
        self._start: RngState | None = None

    def begin(self, count: int) -> None:
        """An update of so many micro-batches begins."""
        self.abandon()
        self._losses.expected, self.has_updated = count, False

    def take(self, code: Code, *args: Any, **kwargs: Any) -> Sequence[torch.Tensor]:
        """Takes the next micro-batch.

        Returns:
            The losses that are known now, in order: of all micro-batches with the last, and none before; or one each
            time, if the update is no training step. With several processes those of all, each as its part of the sum.
        """
        if self.reason is not None or self.known_step() is None:
            return [streaming_code(self.compiled.megatrain, partial(code, *args, **kwargs))]
        try:
            return self._taken(code, args, kwargs)
        except BaseException:
            self.abandon()
            raise

    def taken(self, code: Code, *args: Any, **kwargs: Any) -> Sequence[torch.Tensor]:
        """As `take`; if it fails, the other processes hear why."""
        take = partial(self.take, code, *args, **kwargs)
        return take() if self.several is None else self.several.announcing(take)

    def fall_back(self, reason: str) -> None:
        """No update is a training step from now on.

        Raises:
            ExecuteError: If there are several processes.
        """
        self._refuse_in_several(reason)
        if self.reason is None:
            self.reason = reason
            self._say(reason)

    def _refuse_in_several(self, reason: str, error: Exception | None = None) -> None:
        if self.several is not None:
            self.several.refuse_apart(reason, error)

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            warnings.warn(
                f"{reason}, so an update isn't one training step.\n"
                "  Each call of the model streams its weights anew, and the optimizer runs after the backward.\n"
                "  The numbers are the same; docs/trainers.md says what makes it one training step.",
                StreamedCallsWarning,
                stacklevel=2,
            )

    def abandon(self) -> None:
        """Forgets micro-batches whose update doesn't come."""
        self._losses.abandon()

    def known_step(self) -> TrainStep | None:
        """The training step, made now if there is none for the present settings; None if there can't be one."""
        if self.step is not None and not is_same(self._made_for, self._settings()):
            self.step.flush()
            self.step = None
        if self.step is None and not self._has_none:
            try:
                self.load(self._make_step)
            except OptimizerError as error:
                self._has_none = True
                said = str(error).splitlines()[0].rstrip(".")
                self.fall_back(f"the optimizer can't update in a training step ({said})")
        return self.step

    def update(self, optimizer: torch.optim.Optimizer) -> bool:
        """Updates masters, of an update that was no training step.

        Returns:
            Whether there are masters besides the parameters; otherwise the optimizer's own step updates these.

        Raises:
            OptimizerError: If the optimizer's `step` can't be called: it would need a closure, say.
        """
        compiled = self.compiled.megatrain
        if compiled.options.precision == "fp32":
            return False
        parameters = [[p] for group in optimizer.param_groups for p in group["params"]]
        blocks = BlockOptimizer(optimizer, parameters, code=MasterStep(compiled.masters))
        blocks.begin()
        for number in range(len(parameters)):
            blocks.update(number)
        blocks.finish()
        return True

    def load(self, load: Callable[[Callable[[Any, Any], Any]], TrainStep]) -> None:
        """Takes a training step that `load` makes for a loss, or reads from a checkpoint."""
        self.step, self._made_for = load(self._losses), self._settings()

    def _taken(self, code: Code, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[torch.Tensor]:
        if not self._losses.waiting:
            self._start = self._losses.generators()
        obstacle = self._losses.start(code, args, kwargs)
        if obstacle is not None:
            self.fall_back(obstacle)
            return self.run_waiting()
        return self._run() if len(self._losses.waiting) == self._losses.expected else ()

    def run_waiting(self) -> Sequence[torch.Tensor]:
        """Runs the micro-batches that wait, each by itself; returns their losses."""
        if self._losses.waiting:
            self._refuse_in_several("the training ends between two micro-batches of an update")
        return self._losses.run_alone()

    def _outside_model(self) -> list[torch.Tensor]:
        """What the optimizer trains besides the model (a loss's own parameters)."""
        own = set(self.compiled.megatrain.model.parameters())
        return [p for group in self._made_for[0].param_groups for p in group["params"] if p not in own]

    def _run(self) -> Sequence[torch.Tensor]:
        assert self.step is not None
        batches = self._losses.batches()
        self._losses.outside = outside = self._outside_model()
        start = [None if p.grad is None else p.grad.clone() for p in outside]
        try:
            self._plan_longest(self.step, batches)
            self.step(batches)
        except MicroBatchError as error:  # found before the first operation: the code still waits
            reason = "the micro-batches of an update run other layers (the model leaves out some at random, say)"
            self._refuse_in_several(reason, error)
            self._say(reason)
            return self.run_waiting()
        except (*AGAIN, ReadsParameterError) as error:
            self._refuse_in_several(reason_of(error), error)
            # The step is undone. What the code did besides (a list of metrics, say) it does once more.
            waiting = self._losses.abandon()
            assert self._start is not None
            self._start.restore(self.compiled.megatrain.options.device)
            _put_gradients(outside, start)
            if not isinstance(error, SpentError):
                self.fall_back(reason_of(error))
            return [each.code() for each in waiting]
        # The trainer's code forgets gradients of the model alone; a loss's own stay until somebody forgets these.
        _put_gradients(outside, self._losses.gradients_outside)
        self._losses.waiting.clear()
        self.has_updated = True
        if self.evaluates:
            _check_evaluations(self.step)
            self.evaluates = False  # is looked at once
        return self._losses.losses

    def _plan_longest(self, step: TrainStep, batches: Sequence[MicroBatch]) -> None:
        """Plans a step of the longest batches, so that none is refused later.

        Raises:
            ScheduleError: If the memory is too small for it.
        """
        lengths, longest = self.compiled.megatrain.lengths, self.longest
        if lengths is None or longest is None:
            return
        length, rows = longest
        given = Arguments.of(self.compiled.megatrain.model, batches[0].args, dict(batches[0].kwargs))
        length *= rows if lengths.is_flattened(given) else 1
        try:
            with lengths.at_least(length):
                step.prepare(batches)
        except ScheduleError as error:
            error.add_note(f"megatrain: this is the step of the longest batches, whose rows have {length} tokens.")
            raise
        self.longest = None


def _check_evaluations(step: TrainStep) -> None:
    """Refuses a training whose evaluations the host would have no room for, after its first update.

    Raises:
        ExecuteError: With the bytes.
    """
    there, available = step.host_plan.there_bytes, available_bytes()
    if there > available:
        raise ExecuteError(
            f"evaluations during this training need {format_bytes(there)} more host memory, "
            f"{format_bytes(available)} are available.\n"
            "  The device updates some blocks and alone has their parameters and optimizer state; a call of the model\n"
            "  between two updates brings all of them to the host.\n"
            '  Set eval_strategy="no" and evaluate the checkpoints apart, or train with more host memory.'
        )


def _put_gradients(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
