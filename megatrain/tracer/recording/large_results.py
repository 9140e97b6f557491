"""makes_large(): tells before a call of a capture whether its result is too large to be computed there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch

from megatrain.torch_private import FakeTensorMode, pytree
from megatrain.tracer.calls import call_name

MOST_BYTES = 1 << 30
"""A capture computes nothing larger: a mask of 32768 by 32768 tokens has as much, of one byte each."""
# Bytes of the widest elements, complex numbers of double precision.
_WIDEST = 16


def makes_large(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], operands: Sequence[torch.Tensor], mode: FakeTensorMode
) -> bool:
    """Tells whether a call makes a tensor of more than `MOST_BYTES`, as a mask of a long text is.

    Such a call is tried on tensors without values. No result of torch's own functions has more elements than all
    operands and whole numbers multiplied, so nearly all calls need no trial.

    Args:
        func: The function or method.
        args: Its arguments.
        kwargs: Its keyword arguments.
        operands: The tensors among these; all have values.
        mode: Makes tensors without values.
    """
    if _most_elements(args, kwargs, operands) * _WIDEST <= MOST_BYTES or not _is_of_torch(func):
        return False
    given = max((tensor.untyped_storage().nbytes() for tensor in operands), default=0)
    try:
        with mode:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _without_values, (args, kwargs))
            result = func(*args, **kwargs)
    except Exception:  # whatever is wrong with it, the call itself tells
        return False
    made = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
    return any(t.layout == torch.strided and t.untyped_storage().nbytes() > max(given, MOST_BYTES) for t in made)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _most_elements(args: Sequence[Any], kwargs: Mapping[str, Any], operands: Sequence[torch.Tensor]) -> int:
    numbers = [abs(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) is int]
    return math.prod(max(1, size) for size in (*numbers, *(tensor.numel() for tensor in operands)))


def _is_of_torch(func: Any) -> bool:
    """Tells whether a trial has no effect: a function of torch that changes no operand."""
    name = call_name(func)
    if name.endswith("_") and not name.endswith("__"):
        return False
    if isinstance(func, FunctionType):
        return func.__module__.partition(".")[0] == "torch"
    return isinstance(func, BuiltinFunctionType | MethodDescriptorType | WrapperDescriptorType)
