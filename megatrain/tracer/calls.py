"""Names for what a node calls and for the literals it is called with, importable where possible."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from megatrain.base.torch_private import OpOverload, OpOverloadPacket

_NAMESPACES: tuple[tuple[str, Any], ...] = (
    ("F", F),
    ("torch", torch),
    ("operator", operator),
    ("torch.special", torch.special),
    ("torch.fft", torch.fft),
    ("torch.linalg", torch.linalg),
)


def call_name(func: Callable[..., Any]) -> str:
    """Returns the bare name of a torch function, method or property access."""
    name = getattr(func, "__name__", None) or type(func).__name__
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def is_of_torch(func: Any) -> bool:
    """Tells whether this is a function of torch itself, by its name one that changes no operand."""
    name = call_name(func)
    if name.endswith("_") and not name.endswith("__"):
        return False
    if isinstance(func, FunctionType):
        return func.__module__.partition(".")[0] == "torch"
    return isinstance(func, BuiltinFunctionType | MethodDescriptorType | WrapperDescriptorType)


def target_name(node: fx.Node) -> str:
    """Returns the bare name of the function or method that a node calls, `getitem` for `__getitem__`; else nothing."""
    if node.op == "call_method":
        return str(node.target).removeprefix("__").removesuffix("__")
    return call_name(node.target) if callable(node.target) else ""


def is_property_get(func: Callable[..., Any]) -> bool:
    """Tells whether `func` reads a tensor's property (`x.shape`)."""
    return getattr(func, "__name__", "") == "__get__"


def is_property_set(func: Callable[..., Any]) -> bool:
    """Tells whether `func` assigns to a tensor's property (`x.data = y`)."""
    return getattr(func, "__name__", "") in ("__set__", "__delete__")


def as_call(func: Callable[..., Any]) -> tuple[str, Any]:
    """Returns the `(op, target)` of the fx node that repeats a recorded call.

    Methods of `torch.Tensor` become `call_method`, because their wrapped function objects (`**` arrives as
    `torch._tensor.pow`) have no importable name.
    """
    name = call_name(func)
    if hasattr(func, "call_text"):
        return "call_function", func  # an object of ours
    module = getattr(func, "__module__", None)
    if isinstance(func, FunctionType | BuiltinFunctionType) and module != "torch._tensor":
        if getattr(torch.Tensor, name, None) is not func:
            return "call_function", func
    if hasattr(torch.Tensor, name):
        return "call_method", name
    return "call_function", func


def applied_function(target: Any) -> type[torch.autograd.Function] | None:
    """Returns the `autograd.Function` that a call applies, maybe through an object of ours; None if it applies none."""
    owner = getattr(target, "function" if hasattr(target, "call_text") else "__self__", None)
    return owner if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) else None


def function_text(target: Any) -> str:
    """Returns the printed name of a function that a `call_function` node calls."""
    if isinstance(target, OpOverload | OpOverloadPacket):
        return f"torch.ops.{target}"
    name = call_name(target)
    for prefix, namespace in _NAMESPACES:
        if getattr(namespace, name, None) is target:
            return f"{prefix}.{name}"
    module = getattr(target, "__module__", None) or "torch"
    owner = getattr(target, "__self__", None)
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}.{name}"
    return f"{module}.{getattr(target, '__qualname__', name)}"


def literal_text(value: Any) -> str:
    """Prints an argument of a node as Python; objects without a stable form print as their type."""
    if isinstance(value, fx.Node):
        return str(value.target) if value.op == "get_attr" else value.name
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if value is Ellipsis:
        return "..."
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
        return str(value)
    return _compound_text(value)


def _compound_text(value: Any) -> str:
    text = f"<{type(value).__module__}.{type(value).__qualname__}>"
    if isinstance(value, torch.device):
        text = f"torch.device({str(value)!r})"
    elif isinstance(value, slice):
        text = f"slice({', '.join(map(literal_text, (value.start, value.stop, value.step)))})"
    elif isinstance(value, tuple) and not hasattr(value, "_fields"):
        text = f"({', '.join(map(literal_text, value))}{',' if len(value) == 1 else ''})"
    elif isinstance(value, list):
        text = f"[{', '.join(map(literal_text, value))}]"
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{k!r}: {literal_text(v)}" for k, v in value.items()) + "}"
    return text


def _index_text(index: Any) -> str:
    if isinstance(index, tuple) and index and not hasattr(index, "_fields"):
        return ", ".join(map(_index_text, index)) + ("," if len(index) == 1 else "")
    if isinstance(index, slice):
        bounds = ["" if x is None else literal_text(x) for x in (index.start, index.stop)]
        return ":".join(bounds) + ("" if index.step is None else f":{literal_text(index.step)}")
    return literal_text(index)


def told_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call but those that equal the function's defaults; the rest makes the same call."""
    defaults = _defaults(node)
    if not defaults:
        return node.args, dict(node.kwargs)
    kwargs = {k: v for k, v in node.kwargs.items() if not _is_default(v, defaults.get(k, _NONE))}
    args = list(node.args)
    by_place = list(defaults.values())
    while args and _is_default(args[-1], by_place[len(args) - 1] if len(args) <= len(by_place) else _NONE):
        args.pop()
    return tuple(args), kwargs


def named_arguments(node: fx.Node) -> tuple[dict[str | int, Any], Mapping[str | int, Any]]:
    """Returns the arguments of a call but those that are defaults, and the defaults.

    Arguments go by name where the function is written in Python, else by place, or by name if they were given so.
    """
    defaults = _defaults(node)
    names = list(defaults)
    by_place = {names[i] if i < len(names) else i: value for i, value in enumerate(node.args)}
    given: dict[str | int, Any] = {**by_place, **node.kwargs}
    told = {k: v for k, v in given.items() if not _is_default(v, defaults.get(str(k), _NONE))}
    return told, {name: value for name, value in defaults.items() if value is not _NONE}


_NONE = object()


def _defaults(node: fx.Node) -> dict[str, Any]:
    """The parameters of a function or method written in Python, with their defaults; empty where they aren't known.

    A wrapper's own signature counts, not that of what it wraps: the wrapper is called.
    """
    function: Any = getattr(torch.Tensor, str(node.target), None) if node.op == "call_method" else node.target
    if not isinstance(function, FunctionType):
        return {}
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return {}
    return {p.name: _NONE if p.default is p.empty else p.default for p in parameters}


def _is_default(value: Any, default: Any) -> bool:
    """Tells whether leaving an argument out makes the same call; 1, 1.0 and True are three things."""
    if isinstance(value, float):
        return isinstance(default, float) and value.hex() == default.hex()
    plain = value is None or isinstance(value, bool | int | str)
    return plain and type(value) is type(default) and value == default


def call_text(node: fx.Node) -> str:
    """Prints the call a node makes, without arguments that are defaults: `F.dropout(x, p=0.1)` or `x.view(2, -1)`."""
    args, kwargs = told_arguments(node)
    parts = [literal_text(a) for a in args]
    parts += [f"{k}={literal_text(v)}" for k, v in kwargs.items()]
    if node.op == "call_method" and node.target == "__getitem__":
        return f"{parts[0]}[{_index_text(node.args[1])}]"
    print_call = getattr(node.target, "call_text", None)
    if print_call is not None:
        return print_call(", ".join(parts))
    if node.target is getattr:
        return f"{parts[0]}.{node.args[1]}"
    if node.op == "call_method":
        return f"{parts[0]}.{node.target}({', '.join(parts[1:])})"
    return f"{function_text(node.target)}({', '.join(parts)})"
