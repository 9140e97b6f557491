"""Records each call of an `autograd.Function` as one node, with the user's own backward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import autograd
from torch.utils.checkpoint import CheckpointFunction

from megatrain.patches import original_of, replaced_here
from megatrain.torch_private import function_class, pytree
from megatrain.tracer.recording.recorder import Recorder


@contextmanager
def recorded_functions(recorder: Recorder) -> Generator[None]:
    """Makes each outermost call of a Function one node for the body, in this thread.

    No torch-function mode sees such a call; without this its forward would be recorded and its backward lost.
    """
    calls = _Calls(recorder)
    try:
        with replaced_here(function_class, "__getattribute__", calls.look_up):
            yield
    finally:
        calls.is_over = True


class _Calls:
    """Gives the running forward what it looks up in Functions.

    A call begins in one of two ways. `Function.apply(x)` looks `apply` up, and gets one that records. What was looked
    up before the capture (`self.quantize = Quantize.apply`) goes straight into torch, which looks for the class of the
    context under the caller's grad mode, and then for `forward` without gradients: it gets a `forward` that records.
    """

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._begun: tuple[Any, bool] | None = None
        self.is_over = False
        self._found: Any = original_of(function_class, "__getattribute__")

    def look_up(self, function: Any, name: str) -> Any:
        """Looks an attribute of a Function up."""
        found = self._found(function, name)
        if self._recorder.is_recording:
            return found
        if name == "apply" and _is_inherited(function, name):
            return functools.partial(self._apply, function, found)
        if name == "_backward_cls":
            self._begun = (function, torch.is_grad_enabled())
        elif name == "forward" and self._begun is not None and self._begun[0] is function:
            (_, has_grad), self._begun = self._begun, None
            return functools.partial(self._forward, function, found, has_grad)
        return found

    def _apply(self, function: Any, apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.is_over or self._recorder.is_recording:
            return apply(*args, **kwargs)
        if function is CheckpointFunction:
            # A reentrant checkpoint hides the parameters of what it runs; blocks are recomputed anyway.
            inner, _, *rest = args
            return inner(*rest)
        with self._recorder.paused():
            return self._recorder.record(apply, args, kwargs)

    def _forward(self, function: Any, forward: Callable[..., Any], has_grad: bool, *args: Any) -> Any:
        """Runs the forward of a call that torch began; torch then gives the results their history."""
        if self.is_over:
            return forward(*args)
        takes_context = _is_inherited(function, "setup_context")
        context, inputs = (args[0], args[1:]) if takes_context else (None, args)
        if function is CheckpointFunction:
            self._recorder.refuse(
                "calls a reentrant checkpoint through an `apply` that it looked up earlier",
                "Such a checkpoint hides the parameters of its function.",
                "Call torch.utils.checkpoint.checkpoint.",
            )

        def run(*inputs: Any) -> Any:
            versions = {id(x): x._version for x in inputs if isinstance(x, torch.Tensor)}
            with torch.no_grad():
                result = forward(*args[: len(args) - len(inputs)], *inputs)
                # What torch makes of an input that is returned as it is; made here, the graph knows the object.
                return pytree.tree_map_only(
                    torch.Tensor, lambda t: t.view_as(t) if versions.get(id(t)) == t._version else t, result
                )

        def has_history(tensor: torch.Tensor) -> bool:
            excluded: Any = getattr(context, "non_differentiable", None) or ()
            is_excluded = any(tensor is other for other in excluded)
            return (tensor.is_floating_point() or tensor.is_complex()) and not is_excluded

        is_differentiable = has_grad and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
        with self._recorder.paused(), torch.set_grad_enabled(has_grad):
            apply = inspect.getattr_static(autograd.Function, "apply").__get__(None, function)
            return self._recorder.record_forward(
                apply, inputs, run, has_history if is_differentiable else lambda _: False
            )


def _is_inherited(function: Any, name: str) -> bool:
    """Tells whether a Function has torch's own method of that name, not the user's."""
    owner = next(kind for kind in function.__mro__ if name in vars(kind))
    return issubclass(autograd.Function, owner)
