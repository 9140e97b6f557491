"""The differences between two observations, and the tolerance; the leaves of an output, each with its path."""

from __future__ import annotations

import cmath
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from megatrain.passes.distance import TOLERANCES, largest, scale_by_kind, tensor_distance
from megatrain.passes.program import Program
from megatrain.tools.verification.report import Difference
from megatrain.tracer.python.python_values import vars_of

Key = tuple[str, str]
_WHOLE = (torch.Tensor, np.ndarray, nn.Module, type, ModuleType, FunctionType, MethodType, Enum)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much of a relative difference counts as equal.

    Whole numbers, flags, texts and generator states have to be equal.

    Args:
        given: The user's; None goes by dtype.
        coarsest: At least this much for every floating dtype: that of the autocast regions of the forward. Eager
            casts a weight once and adds its gradients in the coarse dtype, blocks add them after casting back.
        terms: How many roundings add up.
    """

    given: float | None = None
    coarsest: float = 0.0
    terms: int = 1

    @staticmethod
    def of(given: float | None, program: Program, kernels: str = "eager") -> Tolerance:
        """Reads the autocast regions off a program.

        Where kernels aren't eager's own, each block rounds otherwise, and what is allowed is allowed for each.
        """
        nodes = (node for template in program.templates.values() for node in template.graph.nodes)
        dtypes = {dtype for node in nodes for _, dtype in node.meta.get("autocast", ())}
        terms = 1 if kernels == "eager" else len(program.blocks)
        return Tolerance(given, max((TOLERANCES.get(d, 0.0) for d in dtypes), default=0.0), terms)

    def of_value(self, value: Any) -> float:
        """Returns what holds for a tensor, or for any other value."""
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            return 0.0
        by_dtype = max(TOLERANCES.get(value.dtype, 0.0), self.coarsest) * self.terms
        return by_dtype if self.given is None else self.given


def compare(
    expected: Mapping[Key, Any],
    found: Mapping[Key, Any],
    step: int,
    tolerance: Tolerance,
    blocks_of: Callable[[str, str], tuple[str, ...]] = lambda _kind, _name: (),
) -> Iterator[Difference]:
    """Compares two observations entry by entry."""
    scale_of_key = scale_by_kind(expected)
    for key in dict.fromkeys([*expected, *found]):
        kind, name = key
        absolute, reason = _apart(expected, found, key)
        scale = scale_of_key(key)
        relative = absolute / scale if scale and absolute else absolute
        allowed = tolerance.of_value(expected.get(key))
        yield Difference(kind, name, step, absolute, relative, blocks_of(kind, name), allowed, reason)


def _apart(expected: Mapping[Key, Any], found: Mapping[Key, Any], key: Key) -> tuple[float, str]:
    if key not in found:
        return float("inf"), "missing"
    if key not in expected:
        return float("inf"), "eager PyTorch has nothing of that name"
    return distance(expected[key], found[key])


def distance(expected: Any, found: Any) -> tuple[float, str]:
    """Returns the largest absolute difference, and the difference in words if they can't be subtracted.

    NaN equals NaN. Generator states and flags are equal or infinitely far apart.
    """
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        return tensor_distance(expected, found)
    reason = differ(expected, found)
    return (float("inf"), reason) if reason else (0.0, "")


def scale_of(value: Any) -> float:
    """Returns what a difference is relative to: a tensor's largest finite absolute value, or 1."""
    return (largest(value) if isinstance(value, torch.Tensor) else 0.0) or 1.0


# -- leaves -----------------------------------------------------------------------------------------------------------


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
        yield from ((f".{name}", inner) for name, inner in vars_of(item).items())


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
