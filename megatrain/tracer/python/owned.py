"""What a hook has besides the variables that its code names: its object, its bound arguments, its defaults."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from megatrain.tracer.python.contents import CONTAINERS


class Owned(NamedTuple):
    """Values that belong to a hook.

    Args:
        path: How messages name them.
        values: By name.
        code: The code of the hook, where it is written in Python.
        is_object: They are attributes of an object, of which the code may name few.
    """

    path: str
    values: dict[str, Any]
    code: CodeType | None
    is_object: bool


def owned(hook: Any) -> Iterator[Owned]:
    """Yields what belongs to a hook."""
    if isinstance(hook, functools.partial):
        name = getattr(hook.func, "__qualname__", "partial")
        code = getattr(hook.func, "__code__", None)
        yield Owned(name, hook.keywords, code, False)
        yield Owned(name, {f"argument {i}": value for i, value in enumerate(hook.args)}, code, False)
        yield from owned(hook.func)
    elif isinstance(hook, FunctionType):
        yield Owned(hook.__qualname__, _defaults(hook), hook.__code__, False)
        yield Owned(hook.__qualname__, vars(hook), hook.__code__, True)
    elif isinstance(hook, MethodType):
        yield from owned(hook.__func__)
        yield from _object(hook.__self__, getattr(hook.__func__, "__code__", None))
    else:
        yield from _object(hook, getattr(vars(type(hook)).get("__call__"), "__code__", None))


def can_change(value: Any) -> bool:
    """Tells whether other code could change what a value holds."""
    return isinstance(value, CONTAINERS) or (
        hasattr(value, "__dict__") and not isinstance(value, type | FunctionType | nn.Module | torch.Tensor)
    )


def _object(value: Any, code: CodeType | None) -> Iterator[Owned]:
    if hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        yield Owned(type(value).__qualname__, vars(value), code, True)


def _defaults(function: FunctionType) -> dict[str, Any]:
    code, given = function.__code__, function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount][code.co_argcount - len(given) :]
    return {**dict(zip(positional, given, strict=True)), **(function.__kwdefaults__ or {})}
