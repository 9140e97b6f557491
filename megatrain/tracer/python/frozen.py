"""Freezes a function as it is now: later assignments to variables that it closes over don't reach the copy."""

from __future__ import annotations

import functools
from enum import Enum
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any

import torch

from megatrain.tracer.python.contents import VALUES


class NotFrozenError(Exception):
    """The function holds an object whose later changes no copy can be kept from."""


def frozen(value: Any) -> Any:
    """Returns a copy of a function, and of the functions and containers that it holds.

    Raises:
        NotFrozenError: If it holds anything but functions, containers, tensors and values that never change.
    """
    return _frozen(value, {})


def _frozen(value: Any, met: dict[int, Any]) -> Any:
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
    raise NotFrozenError(type(value).__qualname__)


def _frozen_function(function: FunctionType, met: dict[int, Any]) -> FunctionType:
    cells = tuple(CellType() for _ in function.__closure__ or ())
    copied = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells or None)
    met[id(function)] = copied  # before its cells: a function may close over itself
    for cell, original in zip(cells, function.__closure__ or (), strict=True):
        try:
            held = original.cell_contents
        except ValueError:
            raise NotFrozenError("a variable without a value") from None
        cell.cell_contents = _frozen(held, met)
    copied.__defaults__ = _frozen(function.__defaults__, met)
    copied.__kwdefaults__ = _frozen(function.__kwdefaults__, met)
    return copied
