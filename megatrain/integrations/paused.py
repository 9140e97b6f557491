"""PausedCode: a user's code of one micro-batch, which waits at its call of the model until all micro-batches are there.

A training step runs the blocks of all micro-batches in turns, so it needs all calls of the model before it can return
the result of the first. The code around each call (a loss, metrics, `backward`) runs as it is, once, on a thread of its
own: it waits where it calls the model, and goes on when the training step has the result.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatrain.base.torch_private import function_modes
from megatrain.device import autocast_kinds
from megatrain.runtime.streams.events import turns_here, work_for
from megatrain.training.compiled.inside import Compiled
from megatrain.training.compiled.walking import taken_by


class CallsAgainError(Exception):
    """The code called the model once more, after the call whose result it got."""


class DifferentiatesError(Exception):
    """The code asks for gradients of what isn't made of the call's result: of parameters, or between two results."""


class SpentError(CallsAgainError):
    """The training step runs anew, and asks once more for the loss of code that has ended."""


class _Abandoned(BaseException):
    """Ends code that nobody waits for any more."""


@dataclass(frozen=True, slots=True)
class PausedCall:
    """A call of the model.

    Args:
        modes: What the thread had switched on around the call that a training step doesn't repeat, in words; None if
            there is nothing.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modes: str | None


@dataclass(frozen=True, slots=True)
class _Ended:
    value: Any
    error: BaseException | None


class PausedCode:
    """Code that calls a compiled model once with gradients, and runs the backward of what it makes of the result.

    Calls without gradients before that call run at once. Exceptions of the code come out of the method that lets it
    go on.

    Attributes:
        code: What runs, from its beginning.
        call: The call at which the code waits; None before `start`, or if the code ended without one.
    """

    def __init__(
        self,
        compiled: Compiled,
        code: Callable[[], Any],
        after: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.call: PausedCall | None = None
        self._compiled = compiled
        self.code = code
        self._after = after
        self._ended: _Ended | None = None
        self._is_alone = False
        self._has_result = False
        self._events: SimpleQueue[PausedCall | CallsAgainError | DifferentiatesError | _Ended] = SimpleQueue()
        self._orders: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._with_result = ExitStack()

    # -- on the caller's thread -----------------------------------------------------------------------------

    def start(self) -> None:
        """Runs the code up to its call of the model, or to its end."""
        context, device, enter = contextvars.copy_context(), torch.get_default_device(), self._enter_stream()

        def main() -> None:
            try:
                enter()
                with torch.device(device), taken_by(self._called), self._with_result:
                    ended = _Ended(context.run(self.code), None)
            except BaseException as error:  # it is raised on the caller's thread
                ended = _Ended(None, error)
            self._events.put(ended)

        self._thread = threading.Thread(target=main, name="megatrain: code around a model", daemon=True)
        self._thread.start()
        found = self._next()
        self.call = found if isinstance(found, PausedCall) else None

    def give(self, result: Any) -> Any:
        """Gives the code the result of its call, and runs the code to its end.

        Returns:
            What the code returned.

        Raises:
            CallsAgainError: If it calls the model again; it waits there.
            DifferentiatesError: If it asks for gradients that the result doesn't lead to; it waits there.
            SpentError: If it has ended already.
        """
        if self._ended is not None:
            raise SpentError
        turns, enter = turns_here(), self._enter_stream()

        def go_on() -> Any:
            work_for(turns)  # the training step waits for this thread: what would wait for the step is refused here
            enter()
            self._has_result = True
            self._with_result.enter_context(_GradientsOfResults(self._differentiated))
            self._with_result.enter_context(self._after())
            return result

        return self._to_end(go_on)

    def run_alone(self) -> Any:
        """Runs the code to its end, with calls of the model that run at once, as if it had never waited."""
        call, self._is_alone = self.call, True
        if call is None:
            return self._value()
        return self._to_end(lambda: self._compiled(*call.args, **call.kwargs))

    def abandon(self) -> None:
        """Ends the code where it waits; nothing of it runs after that but its `finally`."""
        if self._thread is not None and self._ended is None:

            def leave() -> Any:
                raise _Abandoned

            self._orders.put(leave)
            self._thread.join()
            self._ended = _Ended(None, _Abandoned())

    def _enter_stream(self) -> Callable[[], object]:
        """Returns a function that makes another thread issue the device's work where this thread does."""
        device = self._compiled.options.device
        stream = device.current_stream()
        return (lambda: None) if stream is None else (lambda: device.enter(stream))

    def _to_end(self, order: Callable[[], Any]) -> Any:
        self._orders.put(order)
        found = self._next()
        if isinstance(found, CallsAgainError | DifferentiatesError):
            raise found
        assert isinstance(found, _Ended), "the code doesn't wait twice"
        return self._value()

    def _next(self) -> PausedCall | CallsAgainError | DifferentiatesError | _Ended:
        found = self._events.get()
        if isinstance(found, _Ended):
            self._ended = found
            assert self._thread is not None
            self._thread.join()
            if found.error is not None:
                raise found.error
        return found

    def _value(self) -> Any:
        assert self._ended is not None
        return self._ended.value

    # -- on the code's thread -------------------------------------------------------------------------------

    def _called(self, compiled: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if compiled is not self._compiled or self._is_alone:
            return compiled(*args, **kwargs)
        if self._has_result:
            self._events.put(CallsAgainError())
        elif not torch.is_grad_enabled():
            return compiled(*args, **kwargs)
        else:
            self._events.put(PausedCall(args, kwargs, _modes_here()))
        return self._orders.get()()

    def _differentiated(self) -> None:
        self._events.put(DifferentiatesError())
        self._orders.get()()


class _GradientsOfResults(TorchFunctionMode):
    """Tells when code asks for gradients that it can't get from a call's result, which has no history.

    Without `allow_unused` torch would raise; with it, the code would find None.

    Args:
        tell: Is called then, and doesn't return.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward and kwargs.get("inputs") is not None:
            self._tell()
        if func is not torch.autograd.grad:
            return func(*args, **kwargs)
        try:
            found = func(*args, **kwargs)
        except RuntimeError:
            self._tell()
            raise
        if any(gradient is None for gradient in found):
            self._tell()
        return found


def _modes_here() -> str | None:
    kinds = [kind for kind in autocast_kinds() if torch.is_autocast_enabled(kind)]
    if kinds:
        return f"autocast on {', '.join(kinds)}"
    # One function mode is the default device, which `start` sets.
    return "a mode of torch" if len(function_modes()) > 1 else None
