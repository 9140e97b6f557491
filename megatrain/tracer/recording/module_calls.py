"""Follows calls that no mode of torch sees during a capture: of modules, of Functions, of `torch.vmap`."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import autograd, nn
from torch.nn.modules import batchnorm
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from megatrain.base.patches import original_of, replaced_here
from megatrain.base.torch_private import FakeTensor, backward_home, function_class, function_modes, pytree, vmap_home
from megatrain.tracer.python.python_values import VALUES
from megatrain.tracer.python.snapshot import Snapshot
from megatrain.tracer.recording.obstacles import RUN_AGAIN, Attempt, Obstacle
from megatrain.tracer.recording.opaque import CallForm
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
    """Asks for wider code to run again where captured code has changed an opaque module before it calls the module."""
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
def noticed_backwards(recorder: Recorder) -> Generator[None]:
    """Notices where the forward differentiates: then each call must have its own history, and none is recalled."""
    original: Any = original_of(backward_home, "_engine_run_backward")

    def run(*args: Any, **kwargs: Any) -> Any:
        if recorder.recall.is_used:
            recorder.recall.refuse()
        return original(*args, **kwargs)

    with replaced_here(backward_home, "_engine_run_backward", run):
        yield


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


class Mapped:
    """Repeats a call of `vmap`; the target of a graph node.

    Args:
        hidden: Tensors that the mapped function reads from closures: other tensors stand for them at each call.
        modes: The user's modes for torch functions that were active, outermost first.
    """

    __name__ = "vmap"

    def __init__(
        self, call: Callable[..., Any], args: Any, hidden: Sequence[torch.Tensor], modes: Sequence[TorchFunctionMode]
    ):
        self._call = call
        self._hidden = tuple(hidden)
        self._modes = tuple(modes)
        self._form = CallForm(args)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Runs it on the tensors among the arguments, followed by those that stand for the hidden ones."""
        given = iter(tensors)
        args, kwargs = self._form.filled(given)
        stand_ins = {id(old): new for old, new in zip(self._hidden, given, strict=True)}
        with ExitStack() as stack:
            for mode in self._modes:
                stack.enter_context(mode)
            stack.enter_context(_Replaced(lambda t: stand_ins.get(id(t), t)))
            return self._call(*args, **kwargs)


class _Replaced(TorchFunctionMode):
    """Passes every tensor in every call through a function."""

    def __init__(self, replace: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self._replace = replace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._replace, (args, kwargs or {}))
        return func(*args, **kwargs)


@contextmanager
def recorded_maps(recorder: Recorder) -> Generator[None]:
    """Makes each outermost call of `vmap` one node, where nothing in it is random or needs a gradient."""
    original: Any = original_of(vmap_home, "vmap_impl")

    def vmap(
        function: Any, in_dims: Any, out_dims: Any, randomness: str, chunk_size: Any, *args: Any, **kwargs: Any
    ) -> Any:
        operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        call = functools.partial(original, function, in_dims, out_dims, randomness, chunk_size)
        leaves = pytree.tree_leaves((args, kwargs))
        if recorder.is_recording or randomness != "error" or not all(map(_is_lasting, leaves)):
            return call(*args, **kwargs)
        try:
            # Variables that the function closes over may stand for something else by the time of a step.
            lasting = functools.partial(original, _frozen(function), *call.args[1:])
        except _NotFrozenError:
            return call(*args, **kwargs)
        hidden = _hidden_tensors(recorder, operands, lambda: lasting(*args, **kwargs))
        if hidden is None:
            return call(*args, **kwargs)
        modes = function_modes()
        users = modes[modes.index(recorder) + 1 :]
        return recorder.record(Mapped(lasting, (args, kwargs), hidden, users), (*operands, *hidden), {})

    with replaced_here(vmap_home, "vmap_impl", vmap):
        yield


def _is_lasting(leaf: Any) -> bool:
    return _is_plain(leaf) if isinstance(leaf, torch.Tensor) else isinstance(leaf, VALUES)


def _is_plain(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and not tensor.requires_grad


def _hidden_tensors(
    recorder: Recorder, operands: list[torch.Tensor], call: Callable[[], Any]
) -> list[torch.Tensor] | None:
    """Runs a call to find what it reads besides its operands; None if it reads what isn't known before the step."""
    found: dict[int, torch.Tensor] = {}
    met = {id(t) for t in operands}

    def see(tensor: torch.Tensor) -> torch.Tensor:
        if recorder.tape.table.node(tensor) is not None and id(tensor) not in met:
            found[id(tensor)] = tensor
        return tensor

    with recorder.unrecorded(), torch.no_grad(), _Replaced(see):
        call()
    return list(found.values()) if all(map(_is_plain, found.values())) else None


class _NotFrozenError(Exception):
    """The function holds an object whose later changes no copy can be kept from."""


def _frozen(value: Any, met: dict[int, Any] | None = None) -> Any:
    """Returns a copy of a function, and of the functions and containers that it holds; `met` are copies made already.

    Raises:
        _NotFrozenError: If it holds anything but functions, containers, tensors and values that never change.
    """
    met = {} if met is None else met
    if id(value) in met:
        return met[id(value)]
    if isinstance(value, FunctionType):
        return _frozen_function(value, met)
    if isinstance(value, functools.partial):
        args = [_frozen(x, met) for x in value.args]
        return functools.partial(_frozen(value.func, met), *args, **_frozen(value.keywords, met))
    if type(value) in (tuple, list, set, frozenset):
        return type(value)(_frozen(x, met) for x in value)
    if type(value) is dict:
        return {key: _frozen(x, met) for key, x in value.items()}
    if isinstance(value, (*VALUES, torch.Tensor, torch.Size, Enum, type, BuiltinFunctionType, ModuleType)):
        return value
    raise _NotFrozenError(type(value).__qualname__)


def _frozen_function(function: FunctionType, met: dict[int, Any]) -> FunctionType:
    cells = tuple(CellType() for _ in function.__closure__ or ())
    copied = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells or None)
    met[id(function)] = copied  # before its cells: a function may close over itself
    for cell, original in zip(cells, function.__closure__ or (), strict=True):
        try:
            held = original.cell_contents
        except ValueError:
            raise _NotFrozenError("a variable without a value") from None
        cell.cell_contents = _frozen(held, met)
    copied.__defaults__ = _frozen(function.__defaults__, met)
    copied.__kwdefaults__ = _frozen(function.__kwdefaults__, met)
    return copied
