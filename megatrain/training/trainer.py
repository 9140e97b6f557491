"""Running: one training step while it runs; the trainer that a `Run` calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from megatrain.base.interrupts import Interrupts
from megatrain.device import find
from megatrain.errors import ExecuteError, ReadsParameterError
from megatrain.optim.moments import Moments
from megatrain.optim.updates import Updates
from megatrain.planning.loss_bytes import Loss
from megatrain.runtime.accumulation import check_kind, gradient_form, hooked, is_hooked, laid_out, warn_of_order
from megatrain.runtime.call import Versions
from megatrain.runtime.exchange import Exchange
from megatrain.runtime.random_calls import RngState
from megatrain.scheduler.instructions import Bytes
from megatrain.tracer.block_image import BlockImage
from megatrain.training.batch import Differentiated, Shares, loss_of
from megatrain.training.completion import Looked
from megatrain.training.device_updates import DeviceUpdates
from megatrain.training.setup import Setting

Gradients = list[torch.Tensor | None]


class _Handed(torch.autograd.Function):
    """Makes results from tensors: as in eager, results aren't leaves, so a loss may write into them."""

    @staticmethod
    def forward(ctx: Any, tensors: Sequence[torch.Tensor], gradients: Gradients, anchor: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *found: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        kept: Gradients = ctx.gradients
        for index, gradient in enumerate(found):
            known = kept[index]
            if gradient is not None:  # more than once, where the loss runs a backward itself
                kept[index] = gradient if known is None else known + gradient
        return None, None, None


def handed(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Gradients]:
    """Hands tensors to a loss.

    Returns:
        The results, and where the gradients of each will be.
    """
    gradients: Gradients = [None] * len(tensors)
    if not tensors:
        return [], gradients
    with torch.enable_grad():
        results = _Handed.apply(tensors, gradients, torch.empty(0, requires_grad=True))
    return list(results), gradients


def spent(loss: torch.Tensor) -> torch.Tensor:
    """Returns the loss of a step, whose `backward` says that the step has run it; saved or copied it is like any."""
    vars(loss).update(backward=_refuse_backward, __getstate__=dict)
    return loss


def _refuse_backward(*_: object, **__: object) -> None:
    raise ExecuteError(
        "the training step that returned this loss has run its backward.\n"
        "  A TrainStep runs forward, backward, clipping and the update in its one call.\n"
        "  Leave out backward(), clip_grad_norm_() and optimizer.step(); clip with TrainStep(max_grad_norm=)."
    )


class Running:
    """Computes losses from outputs, takes gradients, and updates parameters when the schedule says so.

    Args:
        setting: Everything that the step runs.
        shares: Factors of the micro-batches' losses, checked before anything is updated.
        loss: Computes a loss from a result; None if the result is the loss.
        updates: Takes the gradients.
        tensors: The model's state, by key.
        threads: How many threads the work of the host may take.
        looks: Whether a gradient that isn't finite prevents the updates.
        exchange: Who else takes this step.
        there: Updates blocks on the device; None if no schedule so far has such blocks.
        marked: Marks tensors of which the host has old values in its body.

    Attributes:
        has_begun: The optimizers have begun the step with this step's gradients.
        has_updated: A parameter was updated from gradients of this step, so it can't be undone.
        is_skipped: Nothing will be updated, because a gradient isn't finite.
        micro_batch: The micro-batch of the present operation.
        kind: The kind of the step.
        interrupts: Lets Ctrl-C through between operations.
        drawing: Held by hooks on gradients, and by this step's compute while it repeats earlier draws.
        shares: See above.
        exchange: See above.
    """

    def __init__(
        self,
        setting: Setting,
        shares: Shares,
        loss: Loss | None,
        updates: Updates,
        tensors: Mapping[str, torch.Tensor],
        threads: int,
        *,
        looks: bool,
        exchange: Exchange,
        there: DeviceUpdates | None = None,
        marked: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.kind = setting.kind
        self.interrupts = Interrupts()
        self.has_begun = self.has_updated = False
        self.is_skipped = False
        self.micro_batch = 0
        self.drawing = threading.RLock()
        self._setting = setting
        self._deferred = frozenset(setting.schedule.deferred)
        self.has_loss = loss is not None
        self._read: Versions | None = None
        self._hooking: int | None = None
        self._has_hooks = any(variant.runs_in_backward for variant in setting.variants)
        self._losses: list[torch.Tensor] = []
        self._norms: dict[str, torch.Tensor] = {}
        self.shares = shares
        self._loss = loss
        self._updates = updates
        self._parameters = {key: tensor for key, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
        self._threads = threads
        self._looks_for_nonfinite = looks
        self.exchange = exchange
        self._there, self._marked = there, marked
        self._beginning = threading.Lock()
        if any([is_hooked(parameter) for parameter in self._parameters.values()]):
            runs_in_backward, order = self._has_hooks, setting.programs[0].gradient_order
            warn_of_order(order, lambda key: is_hooked(self._parameters[key]), lambda: runs_in_backward)

    def inputs(self) -> list[Sequence[torch.Tensor]]:
        """The model's tensor inputs, per micro-batch."""
        pairs = zip(self._setting.traced, self._setting.arguments, strict=True)
        return [traced.written_inputs.given(arguments.tensors) for traced, arguments in pairs]

    @property
    def losses(self) -> Sequence[torch.Tensor]:
        """The micro-batches' losses, each times its share."""
        return self._losses

    # -- on the caller's thread -----------------------------------------------------------------------------

    def before_compute(self, micro_batch: int) -> None:
        """See `StepTrainer`."""
        self.micro_batch = micro_batch
        if not self.has_updated:
            self.interrupts.check()

    def before_backward(self) -> None:
        """See `StepTrainer`."""
        if self._there is not None:
            self._there.vacate()
        self.exchange.vote()

    def differentiate(self, micro_batch: int, outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """See `StepTrainer`."""
        traced, own = self._setting.traced[micro_batch], self._setting.own[micro_batch]
        program = self._setting.programs[micro_batch]
        is_trained = [ref.kind == "value" and program.values[ref.name].requires_grad for ref in program.outputs]
        # If the model returns a parameter and the loss reads it, the parameter gets a gradient here.
        returned = [ref.kind == "state" and self._is_trained(ref.name) for ref in program.outputs]
        results, gradients = handed([t for t, trained in zip(outputs, is_trained, strict=True) if trained])
        of_results, of_gradients = iter(results), iter(gradients)
        given = [
            next(of_results) if trained else t.requires_grad_(b)
            for t, trained, b in zip(outputs, is_trained, returned, strict=True)
        ]
        is_ahead = self._there is not None and self._there.is_ahead
        marked = self._marked() if is_ahead else nullcontext()
        with torch.enable_grad(), self.exchange.watching_loss(), marked:
            traced.leave(given, own.tensors)
            result = traced.result(self._setting.cuts[micro_batch](given), own.tensors)
            loss = loss_of(result, self._setting.batches[micro_batch], self._loss)
            if isinstance(loss, Differentiated):
                shared, is_differentiated = loss.loss, any(gradient is not None for gradient in gradients)
            else:
                shared = self.shares.share(loss, micro_batch)
                is_differentiated = shared.requires_grad
            if not is_differentiated:
                raise ExecuteError(
                    "the loss doesn't depend on the model's result.\n"
                    "  A step differentiates the loss; detached, integer or constant losses have no gradient.\n"
                    "  Compute the loss from the model's result, without detach() and no_grad."
                )
            if not isinstance(loss, Differentiated):
                shared.backward()
        pairs = zip(program.outputs, given, strict=True)
        self._check_own_gradients([ref.name for ref, t in pairs if ref.kind == "state" and t.grad is not None])
        self._losses.append(shared.detach().reshape(()))
        return [next(of_gradients) if trained else None for trained in is_trained]

    def _is_trained(self, key: str) -> bool:
        return key in self._parameters and self._parameters[key].requires_grad

    def _check_own_gradients(self, returned: Sequence[str]) -> None:
        filled = [key for key, p in self._parameters.items() if p.grad is not None]  # pyright: ignore
        for key in filled:
            self._parameters[key].grad = None
        for key in (*filled, *returned):
            raise ReadsParameterError(
                f"the loss reads the parameter `{key}` itself.\n"
                "  A step takes only gradients that come through the model's results.\n"
                "  Compute that term in the model's forward, and return it."
            )

    def begin_backward(self, state: Versions) -> None:
        """See `StepTrainer`."""
        self._read = state

    # -- on other threads -----------------------------------------------------------------------------------

    def hear_norm(self, key: str, norm: torch.Tensor) -> None:
        """See `StepTrainer`."""
        self._norms[key] = norm

    def receive(self, key: str, gradient: torch.Tensor) -> None:
        """See `StepTrainer`. Hooks on the parameter run as in a backward."""
        self.shares.check()
        parameter, norm = self._parameters[key], self._norms.pop(key, None)
        if is_hooked(parameter):
            norm = None  # of the gradient before its hooks
            gradient = gradient.clone()  # a hook may keep it, and must not see the next step's gradient in it
            self._hooking = threading.get_ident()
            try:
                self._has_hooks = True
                allowing = nullcontext() if self._read is None else self._read.allowing(key)
                with self.drawing, self._refusing_draws(key), allowing:
                    left = self._hooked(parameter, gradient)
            finally:
                self._hooking = None
        else:
            left = laid_out(gradient, parameter)
        if left is not None:
            self._updates.receive(parameter, left, norm)

    @contextmanager
    def _refusing_draws(self, key: str) -> Generator[None]:
        """Refuses a hook that draws in a step of several micro-batches, where a loop has no such moment.

        Raises:
            ExecuteError: If one draws.
        """
        if len(self._setting.programs) == 1:
            yield
            return
        device = find(self._setting.programs[0].device)
        before = RngState.of_all(device)
        yield
        if not before.is_same(RngState.of_all(device)):
            raise ExecuteError(
                f"a hook on the gradient of `{key}` draws random numbers, in a step of several micro-batches.\n"
                "  A step runs hooks once, on the sum; a loop runs them after each micro-batch, and so draws others.\n"
                "  Give TrainStep a single micro-batch, or let the hook draw from a generator of its own."
            )

    def _hooked(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        """Returns a gradient after its hooks."""
        gradient = laid_out(hooked(parameter, gradient), parameter)
        post = parameter._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
        if not post:
            return gradient
        kind = gradient_form(gradient)
        parameter.grad = gradient
        try:
            for hook in post.values():
                hook(parameter)
            left: torch.Tensor | None = parameter.grad
            if left is not None:  # pyright: ignore[reportUnnecessaryComparison]
                check_kind(left, kind)
            return left
        finally:
            parameter.grad = None

    def look(self, looked: Looked) -> None:
        """Has the host's values as they are before the updates of this step, because the loss looks at them."""
        if self._there is not None:
            self._there.write_back(looked)

    def check_no_hook(self) -> None:
        """Refuses an action that a hook on a gradient must not take.

        Raises:
            ExecuteError: If this thread runs one.
        """
        if self._hooking == threading.get_ident():
            raise ExecuteError(
                "a hook on a gradient looks at the state of the model or the optimizer.\n"
                "  In the middle of a step some parameters are updated and others are not.\n"
                "  Look after the call of the step has returned."
            )

    def check(self) -> None:
        """Checks, once all gradients are there, that the user's code didn't interfere with them.

        Raises:
            Exception: What the shares found.
            ExecuteError: If hooks wrote what gradients were computed of.
        """
        self.shares.check()
        if self._has_hooks and self._read is not None and not self.has_updated:
            self._read.check("a hook in the backward")

    def squares(self, keys: Sequence[str]) -> None:
        """See `StepTrainer`. Parts of parameters, which have keys as well, are whole with their parameter."""
        torch.set_num_threads(self._threads)
        self._updates.take_squares(self._parameters[key] for key in keys if key in self._parameters)

    def norm(self) -> None:
        """See `StepTrainer`."""
        self._updates.take_norm()
        self.is_skipped = self._looks_for_nonfinite and self._updates.arriving.nonfinite is not None

    def update(self, block: int) -> None:
        """See `StepTrainer`."""
        torch.set_num_threads(self._threads)
        if block in self._deferred:
            if self._updates.is_under_way:  # otherwise nothing is due: in the first step, and after a look
                self._updates.update(block)
            return
        if self.is_skipped:
            return
        self._begin()
        try:
            self._updates.update(block)
        finally:
            self._note_updates()

    def read_moments(self, block: int) -> None:
        """See `StepTrainer`. Of updates of the step before there may be none: in the first step, and after a look."""
        if block not in self._deferred or self._updates.is_under_way:
            self._moments.read(block)

    def write_moments(self, block: int) -> None:
        """See `StepTrainer`."""
        self._moments.write(block)

    @property
    def _moments(self) -> Moments:
        assert self._updates.moments is not None
        return self._updates.moments

    def norm_there(self, key: str, gradient: torch.Tensor, norm: torch.Tensor | None) -> None:
        """See `StepTrainer`."""
        self._updates.take_squares_there(self._parameters[key], gradient, norm)

    def bring(self, layout: BlockImage, where: Bytes, *, stays: bool) -> None:
        """See `StepTrainer`."""
        assert self._there is not None
        trained = {e.key: self._parameters[e.key] for e in layout.entries if self._is_trained(e.key)}
        self._there.bring(layout, where, trained, stays=stays)

    def update_there(self, block: int, layout: BlockImage, gradients: Sequence[torch.Tensor | None]) -> None:
        """See `StepTrainer`; on the caller's thread."""
        assert self._there is not None
        if self.is_skipped:
            return
        pairs = zip(layout.entries, gradients, strict=True)
        trained = [gradient for entry, gradient in pairs if self._is_trained(entry.key)]
        self._begin()
        try:
            self._there.update(layout, block, trained, self._updates)
        finally:
            self._note_updates()

    def wait(self, block: int, go_on: Callable[[], object]) -> None:
        """See `StepTrainer`."""
        if block in self._deferred:
            if self._updates.is_under_way:
                self._updates.wait(block, go_on, is_of_before=True)
        elif not self.is_skipped:
            self._updates.wait(block, go_on, is_of_before=False)
            self.has_updated = True  # a part of it, on some process

    def _begin(self) -> None:
        """Begins the optimizers' step with this step's gradients; the previous step ends first."""
        with self._beginning:  # the device's first update may come at the same time as the host's
            if not self.has_begun:
                self.check()
                if self._updates.is_under_way:
                    self._updates.finish()
                self._updates.begin()
                self.has_begun = True

    def finish(self) -> None:
        """Runs the rest of the step that the optimizers have begun, if they have, but not what this step defers."""
        is_rest_deferred = bool(self._deferred) and self.has_begun and self._updates.due == sorted(self._deferred)
        if self._updates.is_under_way and not is_rest_deferred:
            try:
                self._updates.finish()
            finally:
                self._note_updates()
        if self.kind.reports_norm and self._updates.arriving.norm is None:
            self._updates.take_norm()  # of a step that failed in the middle, whose host's work is done here

    def _note_updates(self) -> None:
        # Of several optimizers some may have updated a parameter before another one failed.
        self.has_updated = self.has_begun and self._updates.has_updated
