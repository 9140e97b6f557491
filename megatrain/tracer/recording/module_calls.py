"""Follows module calls during a capture, and knows which modules are repeated."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import autograd, nn
from torch.nn.modules import batchnorm
from torch.utils.checkpoint import CheckpointFunction

from megatrain.patches import original_of, replaced_here
from megatrain.torch_private import function_class, pytree
from megatrain.tracer.python.python_values import VALUES
from megatrain.tracer.python.snapshot import Snapshot
from megatrain.tracer.recording.obstacles import RUN_AGAIN, Attempt, Obstacle
from megatrain.tracer.recording.random_numbers import HostRng
from megatrain.tracer.recording.recorder import Recorder
from megatrain.tracer.source_line import user_line


def repeated_modules(root: nn.Module) -> frozenset[str]:
    """Returns the names of modules that stand twice or more, by class, in one ModuleList or Sequential."""
    found: set[str] = set()
    for prefix, container in root.named_modules(remove_duplicate=False):
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        counts = Counter(type(child) for child in container.children())
        # Not `children()`, which lists a module that stands twice only once.
        distinct = Counter(map(type, container._modules.values()))
        for name, child in container.named_children():
            if max(counts[type(child)], distinct[type(child)]) > 1:
                found.add(f"{prefix}.{name}" if prefix else name)
    return frozenset(found)


@contextmanager
def followed_calls(recorder: Recorder, root: nn.Module, attempt: Attempt) -> Generator[None]:
    """Follows the calls of modules: keeps `module_stack`, and makes each call of an opaque module one node.

    Notes the innermost that draws from Python's or NumPy's generators, if the attempt looks for it.

    At a step, an opaque module finds itself as it is between calls, without what captured code has changed in it
    before. Hooks on it are part of its call.
    """
    names = {id(module): name for name, module in reversed(list(root.named_modules()))}
    own_code = {id(root.get_submodule(name)): name for name in attempt.opaque}
    start = {name: Snapshot(root.get_submodule(name)) for name in attempt.opaque}
    repeated = repeated_modules(root)
    calls: Counter[int] = Counter()
    stack = recorder.tape.module_stack
    original: Any = original_of(nn.Module, "__call__")

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(module) in own_code and not recorder.is_recording:
            name = own_code[id(module)]
            _check_as_found(recorder, name, start[name])
            return recorder.record_module(module, name, args, kwargs)
        name = names.get(id(module))
        if name is None:
            return original(module, *args, **kwargs)
        stack.append((name, calls[id(module)]))
        calls[id(module)] += 1
        looks = attempt.follows_host and not recorder.is_recording
        before = HostRng.now() if looks else None
        try:
            return original(module, *args, **kwargs)
        finally:
            if looks and not recorder.host_drawer and before != HostRng.now():
                recorder.host_drawer = recorder.tape.calls()
            stack.pop()
            if name in repeated:
                recorder.let_go()

    with replaced_here(nn.Module, "__call__", call):
        yield


def _check_as_found(recorder: Recorder, name: str, start: Snapshot) -> None:
    """Asks for wider code to run again where captured code has changed an opaque module before it calls the module.

    Raises:
        Obstacle: If it has.
    """
    for change in start.changes():
        is_equal_value = isinstance(change.now, VALUES) and not change.is_plain
        # Other tensors are operands of the node; a parametrization takes the name itself away.
        is_state = isinstance(change.before, torch.Tensor) and isinstance(change.now, torch.Tensor)
        if change.where not in recorder.changed_by_users and not is_equal_value and not is_state:
            raise Obstacle(
                f"changes `{_path(name, change.name)}` and then calls `{name}`",
                "That module runs its own code again at each step, and would find itself without the change.",
                "Pass the value as an argument.",
                remedy=RUN_AGAIN,
                place=user_line(),
                calls=recorder.tape.calls(),
            )


def _path(name: str, inner: str) -> str:
    return f"{name}.{inner}" if name else inner


@contextmanager
def kept_dtypes(recorder: Recorder) -> Generator[None]:
    """Lets modules convert themselves (`self.head.to(x.dtype)`) where that changes nothing."""
    original: Any = original_of(nn.Module, "_apply")

    def convert(module: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        tensors = [*module.parameters(recurse), *module.buffers(recurse)]
        if recorder.is_recording or not any(map(recorder.is_state, tensors)):
            return original(module, fn, recurse)
        with recorder.unrecorded():
            changes = any(fn(tensor) is not tensor for tensor in tensors)
        if changes:
            recorder.refuse(
                f"converts the weights of a {type(module).__qualname__}",
                "Weights keep their dtype and their place in host memory; the device only borrows them.",
                "Convert the module before training, or its input in the forward.",
            )
        return module

    with replaced_here(nn.Module, "_apply", convert):
        yield


def with_backward_hooks(root: nn.Module) -> dict[str, str]:
    """Names the modules that carry backward hooks: these see autograd's graph, not the forward."""
    return {
        name: f"has backward hooks on `{name or type(module).__name__}`"
        for name, module in root.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    }


@contextmanager
def followed_counts(recorder: Recorder) -> Generator[None]:
    """Follows the number of batches by which a BatchNorm without a momentum divides."""
    original: Any = original_of(batchnorm, "float")

    def read(value: Any = 0.0) -> Any:
        if not isinstance(value, torch.Tensor) or recorder.is_recording:
            return original(value)
        return recorder.read_number(value, float)

    with replaced_here(batchnorm, "float", read):
        yield


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
