"""How tests compare what eager PyTorch leaves behind with what another way of running leaves: bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn


def difference(
    expected: Any, found: Any, path: str = "", tolerance: float = 0.0, scale: float | None = None
) -> str | None:
    """Names the first place where two values differ, through containers and dataclasses; dictionaries have no order.

    Args:
        expected: What eager PyTorch gives, as a rule.
        found: What is compared with it. Tensors agree in layout, shape, dtype, `requires_grad` and bits; each NaN is
            equal to each other.
        path: The name of the place.
        tolerance: How far tensors may differ, relative to `scale`.
        scale: None: the largest number of each expected tensor.
    """
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        return _difference_of_tensors(expected, found, path, tolerance, scale)
    if type(expected) is not type(found):
        return f"{path}: {type(expected).__name__} against {type(found).__name__}"
    if is_dataclass(expected):
        expected, found = vars(expected), vars(found)
    if not isinstance(expected, Mapping | list | tuple):
        return None if expected == found else f"{path}: {expected!r} against {found!r}"
    ones, others = (v if isinstance(v, Mapping) else dict(enumerate(v)) for v in (expected, found))
    if ones.keys() != others.keys():
        return f"{path}: only one has {sorted(map(str, ones.keys() ^ others.keys()))}"
    places = (difference(ones[key], others[key], f"{path}/{key}", tolerance, scale) for key in ones)
    return next((text for text in places if text is not None), None)


def _difference_of_tensors(
    expected: torch.Tensor, found: torch.Tensor, path: str, tolerance: float, scale: float | None
) -> str | None:
    kinds = [f"{t.layout}, {tuple(t.shape)}, {t.dtype}, requires_grad={t.requires_grad}" for t in (expected, found)]
    if kinds[0] != kinds[1]:
        return f"{path}: {kinds[0]} against {kinds[1]}"
    one, other = (t.detach() if t.layout == torch.strided else t.detach().to_dense() for t in (expected, found))
    if _has_same_bits(one, other):
        return None
    nan = one.isnan()
    if torch.equal(nan, other.isnan()) and _has_same_bits(one.masked_fill(nan, 0), other.masked_fill(nan, 0)):
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    gap, size = float((one.to(wide) - other.to(wide)).abs().max()), largest(one) if scale is None else scale
    return None if tolerance and gap <= tolerance * size else f"{path}: differs by {gap:.3e} of {size:.3e}"


def _has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    flat = (t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(*flat)


def largest(value: Any) -> float:
    """The largest absolute number of a tensor, or of the tensors of a dictionary or a list."""
    if isinstance(value, torch.Tensor):
        return float(value.detach().abs().max()) if value.numel() else 0.0
    parts = value.values() if isinstance(value, Mapping) else value or ()
    return max(map(largest, parts), default=0.0)


def assert_same(
    expected: Any, found: Any, what: object = "", tolerance: float = 0.0, *, scale: float | None = None
) -> None:
    text = difference(expected, found, str(what), tolerance, scale)
    assert text is None, text


def assert_same_bits(expected: torch.Tensor, found: torch.Tensor, what: str) -> None:
    """Compares tensors of which one is trained, say, and the other a copy of its values."""
    assert_same(expected.detach(), found.detach(), what)


def assert_same_state(eager: nn.Module, other: nn.Module) -> None:
    """Compares parameters, their gradients and the strides of these, and buffers."""
    assert_same(_state(eager), _state(other), "state")


def _state(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    dense = {name: g for name, g in gradients.items() if g is not None and g.layout == torch.strided}
    return found | gradients | {f"strides of the {name}": g.stride() for name, g in dense.items()}


def snapshot(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that training changes, copied; the model's own objects, so nothing is completed by reading it."""
    return {
        "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
        "buffers": {name: b.detach().clone() for name, b in model.named_buffers()},
        "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers],
        "generator": torch.get_rng_state(),
    }
