"""OneStep: all micro-batches of a trainer's update as one training step of megatrain."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.compiled.module import CompiledModule
from megatrain.errors import DrawsError, MicroBatchError, OptimizerError, ReadsParameterError, StreamedCallsWarning
from megatrain.integrations.hf.for_losses import has_forward_replaced
from megatrain.integrations.hf.whole_calls import check_streamed, gradients_of, streaming_code
from megatrain.integrations.paused import CallsAgainError, DifferentiatesError, PausedCall, PausedCode, SpentError
from megatrain.optim.block_update import MasterStep
from megatrain.optim.blockwise import BlockOptimizer
from megatrain.runtime.draws import only_as_a_loop
from megatrain.runtime.rng import GlobalGenerators
from megatrain.torch_private import FakeTensor
from megatrain.tracer.arguments import tensors_given
from megatrain.tracer.equal import is_equal
from megatrain.tracer.recording.opaque import tensors_in
from megatrain.training.batch import Differentiated, MicroBatch
from megatrain.training.step import TrainStep

Code = Callable[[], torch.Tensor]
"""The trainer's own code for one micro-batch: it calls the model, runs the backward and returns the loss."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    code: Code
    paused: PausedCode


class _LossUnknownError(Exception):
    """A loss is made by code of which nothing is known before it runs."""


class _DrawsBehindError(Exception):
    """A loss draws random numbers behind its call of the model, ahead of the next micro-batch's."""


_AGAIN: dict[type[Exception], str] = {
    CallsAgainError: "the loss calls the model more than once",
    DifferentiatesError: "the loss asks for gradients that go through the model",
    DrawsError: "nothing tells ahead how many random numbers the model draws (a module runs its own code, say)",
    _DrawsBehindError: "the loss draws random numbers behind its call of the model",
}


class OneStep:
    """Collects the micro-batches of an update, and takes them in one training step.

    What can't be one training step runs as the trainer would run it, with a model whose calls stream: each call brings
    the weights anew, and the update follows on the host. A warning says so, and why, once.

    Args:
        compiled: The model.
        make_step: Makes the training step for a loss.
        settings: What `make_step` reads: an optimizer, and plain values. If these change, it makes another.
        is_models_own: Tells whether the loss is the one that the model returns, so that it takes no memory of its own.
        attributes: The trainer's attributes. Code that sets one ahead of its call of the model would find the value of
            the last micro-batch behind the call.
        of_losses: The model as losses hold it. Code that replaces its `forward` around the call would find the
            replacement of another micro-batch.

    Attributes:
        compiled: See above.
        step: The training step; None before the first, and if there can be none.
        reason: Why updates aren't training steps; None if they are.
        has_updated: The update was taken within the training step, and the trainer's own has nothing left to do.
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
        self.compiled = compiled
        self._make_step = make_step
        self._settings = settings
        self._made_for: tuple[Any, ...] = ()
        self._is_models_own = is_models_own
        self._attributes = attributes
        self._of_losses = of_losses
        self._waiting: list[_Waiting] = []
        self._has_none = False
        self._said: set[str] = set()
        self._expected = 1
        self._start: GlobalGenerators | None = None
        self._losses: list[torch.Tensor] = []
        self._outside: list[torch.Tensor] = []
        self._gradients_outside: list[torch.Tensor | None] = []

    def begin(self, count: int) -> None:
        """An update of so many micro-batches begins."""
        self.abandon()
        self._expected, self.has_updated = count, False

    def take(self, code: Code) -> Sequence[torch.Tensor]:
        """Takes the next micro-batch.

        Returns:
            The losses that are known now, in order: of all micro-batches behind the last, and none before; or one each
            time, if the update is no training step.
        """
        if self.reason is not None or self.known_step() is None:
            return [streaming_code(self.compiled.megatrain, code)]
        try:
            return self._taken(code)
        except BaseException:
            self.abandon()
            raise

    def fall_back(self, reason: str) -> None:
        """No update is a training step from now on."""
        if self.reason is None:
            self.reason = reason
            self._say(reason)

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            warnings.warn(
                f"{reason}, so an update isn't one training step.\n"
                "  Each call of the model streams its weights anew, and the optimizer runs behind the backward.\n"
                "  The numbers are the same; docs/trainers.md says what makes it one training step.",
                StreamedCallsWarning,
                stacklevel=2,
            )

    def abandon(self) -> None:
        """Forgets micro-batches whose update doesn't come."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.paused.abandon()

    def known_step(self) -> TrainStep | None:
        """The training step, made now if there is none for the present settings; None if there can't be one."""
        if self.step is not None and not _is_same(self._made_for, self._settings()):
            self.step.flush()
            self.step = None
        if self.step is None and not self._has_none:
            try:
                self.load(self._make_step)
            except OptimizerError as error:
                self._has_none = True
                said = str(error).splitlines()[0].rstrip(".")
                self.fall_back(f"the optimizer can't update block by block ({said})")
        return self.step

    def update(self, optimizer: torch.optim.Optimizer) -> bool:
        """Updates masters, of an update that was no training step.

        Returns:
            Whether there are masters besides the parameters; otherwise the optimizer's own step updates these.

        Raises:
            OptimizerError: If the optimizer can't update block by block: its own step would update the bf16 values.
        """
        compiled = self.compiled.megatrain
        if compiled.options.precision == "fp32":
            return False
        parameters = [[p] for group in optimizer.param_groups for p in group["params"]]
        blocks = BlockOptimizer(optimizer, parameters, code=MasterStep(compiled.masters))
        blocks.begin()
        for number in range(len(blocks)):
            blocks.update(number)
        blocks.finish()
        return True

    def load(self, load: Callable[[Callable[[Any, Any], Any]], TrainStep]) -> None:
        """Takes a training step that `load` makes for a loss, or reads from a checkpoint."""
        self.step, self._made_for = load(self._loss), self._settings()

    def _taken(self, code: Code) -> Sequence[torch.Tensor]:
        before, attributes = self._generators(), _noted(self._attributes)
        gradients = gradients_of(self.compiled.megatrain)
        if not self._waiting:
            self._start = before
        paused = PausedCode(self.compiled.megatrain, code)
        self._waiting.append(_Waiting(code, paused))
        paused.start()
        if paused.call is None:
            check_streamed(self.compiled.megatrain, gradients)
        obstacle = _obstacle(paused.call)
        if obstacle is None and self._expected > 1:
            now = _noted(self._attributes)
            changed = [name for name in now if name not in attributes or not _is_same(attributes[name], now[name])]
            if has_forward_replaced(self._of_losses):
                obstacle = "the loss replaces the model's forward around its call"
            elif changed:
                obstacle = f"the code ahead of the call of the model changes `{changed[0]}` of the trainer"
            elif not before.is_same(self._generators()):
                obstacle = "the loss draws random numbers before it calls the model"
        if obstacle is not None:
            self.fall_back(obstacle)
            return self.run_waiting()
        return self._run() if len(self._waiting) == self._expected else ()

    def run_waiting(self) -> Sequence[torch.Tensor]:
        """Runs the micro-batches that wait, each by itself; returns their losses."""
        waiting, self._waiting = self._waiting, []
        return [each.paused.run_alone() for each in waiting]

    def _outside_model(self) -> list[torch.Tensor]:
        """What the optimizer trains besides the model (a loss's own parameters)."""
        own = set(self.compiled.megatrain.model.parameters())
        return [p for group in self._made_for[0].param_groups for p in group["params"] if p not in own]

    def _generators(self) -> GlobalGenerators:
        return GlobalGenerators.now(self.compiled.megatrain.options.device)

    def _run(self) -> Sequence[torch.Tensor]:
        assert self.step is not None
        batches: list[MicroBatch] = []
        for each in self._waiting:
            call = each.paused.call
            assert call is not None
            batches.append(MicroBatch(each, call.args, call.kwargs))
        losses: list[torch.Tensor] = []
        self._losses, self._outside = losses, self._outside_model()
        start = [None if p.grad is None else p.grad.clone() for p in self._outside]
        try:
            with only_as_a_loop():
                self.step(batches)
        except MicroBatchError:  # found ahead of the first operation: the code still waits
            self._say("the micro-batches of an update run other layers (the model leaves out some at random, say)")
            return self.run_waiting()
        except (*_AGAIN, ReadsParameterError) as error:
            # The step is undone. What the code did besides (a list of metrics, say) it does once more.
            waiting = list(self._waiting)
            self.abandon()
            assert self._start is not None
            self._start.restore(self.compiled.megatrain.options.device)
            self._put_gradients(start)
            if not isinstance(error, SpentError):
                self.fall_back(_AGAIN.get(type(error)) or str(error).splitlines()[0].rstrip("."))
            return [each.code() for each in waiting]
        # The trainer's code forgets gradients of the model alone; a loss's own stay until somebody forgets these.
        self._put_gradients(self._gradients_outside)
        self._waiting = []
        self.has_updated = True
        return losses

    def _loss(self, result: Any, waiting: Any) -> Any:
        if any(isinstance(tensor, FakeTensor) for tensor in tensors_in(result)):
            if not self._is_models_own():
                raise _LossUnknownError
            return result["loss"] if isinstance(result, dict) else result[0]
        before = self._generators()
        loss = waiting.paused.give(result)
        if self._expected > 1 and not before.is_same(self._generators()):
            raise _DrawsBehindError
        self._losses.append(loss)
        self._gradients_outside = [p.grad for p in self._outside]
        return Differentiated(loss)

    def _put_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._outside, gradients, strict=True):
            parameter.grad = gradient


def _obstacle(call: PausedCall | None) -> str | None:
    if call is None:
        return "the loss doesn't call the model with gradients"
    if any(tensor.requires_grad for tensor in tensors_given(call.args, call.kwargs)):
        return "the loss gives the model an input that has gradients itself"
    return None if call.modes is None else f"the loss calls the model under {call.modes}"


def _noted(attributes: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Each attribute, and how much it holds."""
    holders = (list, dict, set, deque)
    return {name: (value, len(value) if isinstance(value, holders) else 0) for name, value in attributes.items()}  # pyright: ignore


def _is_same(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """Compares attributes and settings: plain values by value, all else by identity."""
    if len(left) != len(right):
        return False
    pairs = zip(left, right, strict=True)
    return all(one is other or (isinstance(one, int | float | str) and is_equal(one, other)) for one, other in pairs)
