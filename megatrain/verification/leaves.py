"""Names everything inside a model's output by its path: `logits`, `extras.pair.first`, `cache.layers[0].keys`."""

from __future__ import annotations

import cmath
from collections.abc import Iterator, Mapping
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

_WHOLE = (torch.Tensor, np.ndarray, nn.Module, type, ModuleType, FunctionType, MethodType, Enum)


def named_leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields `(path, leaf)` for every tensor and plain value in an object of any type, in a fixed order.

    Tuples, lists and mappings are opened, and so are the attributes of other objects. What was met before is a leaf
    that says where. The path of the output itself is `result`.
    """
    seen: dict[int, str] = {}
    kept: list[Any] = []
    stack: list[tuple[str, Any]] = [("", value)]
    while stack:
        path, item = stack.pop()
        inside = list(_inside(item))
        if not inside and not isinstance(item, torch.Tensor):
            yield path or "result", item
            continue
        if id(item) in seen:
            yield path, SameAs(seen[id(item)])
            continue
        seen[id(item)] = path or "result"
        kept.append(item)  # an object made on the way must not free its id
        if isinstance(item, torch.Tensor):
            yield path or "result", item
        stack += [(_joined(path, label), inner) for label, inner in reversed(inside)]


class SameAs(str):
    """The path of an object that was met before."""

    __slots__ = ()


def distinct_tensors(value: Any) -> list[torch.Tensor]:
    """Returns the distinct tensors in an object."""
    return [leaf for _, leaf in named_leaves(value) if isinstance(leaf, torch.Tensor)]


def _inside(item: Any) -> Iterator[tuple[str, Any]]:
    """Yields the parts of a container or object with the way to each; nothing for a leaf."""
    if isinstance(item, _WHOLE):
        return
    if isinstance(item, Mapping):
        for key, inner in item.items():
            yield (f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"), inner
    elif isinstance(item, tuple) and hasattr(item, "_fields"):
        yield from ((f".{name}", inner) for name, inner in zip(item._fields, item, strict=True))  # pyright: ignore[reportAttributeAccessIssue]
    elif isinstance(item, tuple | list) and not isinstance(item, torch.Size):
        yield from ((f"[{i}]", inner) for i, inner in enumerate(item))
    else:
        attributes = getattr(item, "__dict__", None)
        held: dict[str, Any] = attributes if type(attributes) is dict else {}
        slots = {n for c in type(item).__mro__ for n in _slots(c) if n not in held and hasattr(item, n)}
        yield from ((f".{n}", inner) for n, inner in held.items())
        yield from ((f".{n}", getattr(item, n)) for n in sorted(slots))


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return tuple(n for n in ((slots,) if isinstance(slots, str) else slots) if not n.startswith("__"))


def _joined(path: str, label: str) -> str:
    return (path + label).removeprefix(".")


def differ(left: Any, right: Any) -> str:
    """Says in words how two plain values differ; empty if they are equal, or of one type that can't be compared."""
    if type(left) is not type(right):
        return f"{_text(right)} instead of {_text(left)}"
    if isinstance(left, np.ndarray):
        same = np.array_equal(left, right, equal_nan=left.dtype.kind in "fc")
    elif type(left).__eq__ is object.__eq__:
        same = True
    else:
        same = bool(left == right) or (_is_nan(left) and _is_nan(right))
    return "" if same else f"{_text(right)} instead of {_text(left)}"


def _is_nan(value: Any) -> bool:
    return isinstance(value, int | float | complex) and cmath.isnan(value)


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        text = repr(value)
        return text if len(text) <= 40 else text[:37] + "..."
    return "a tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__qualname__}"
