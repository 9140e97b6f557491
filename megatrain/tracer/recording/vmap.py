"""Records `torch.vmap` of tensors without gradients as one call: masks and positions are computed so."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatrain.patches import original_of, replaced_here
from megatrain.torch_private import FakeTensor, function_modes, pytree, vmap_home
from megatrain.tracer.python.python_values import VALUES
from megatrain.tracer.recording.opaque import CallForm
from megatrain.tracer.recording.recorder import Recorder


class Mapped:
    """Repeats a call of `vmap`; the target of a graph node.

    Args:
        call: Takes positional and keyword arguments.
        args: These arguments at capture.
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
