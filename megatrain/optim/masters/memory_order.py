"""Tensors in the order of their memory: masters, moments and gradients are worked on as flat stretches of it."""

from __future__ import annotations

import torch

Order = tuple[int, ...] | None
"""Dimensions from the outermost in memory to the innermost; None where that is their own order."""


def memory_order(tensor: torch.Tensor) -> Order:
    """Returns the order in which the elements of a dense tensor fill its memory; see `dense`."""
    if tensor.is_contiguous():
        return None
    return tuple(sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d)))


def in_memory(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """Returns a view whose dimensions stand in that order: contiguous, if the tensor is laid out so."""
    return tensor if order is None else tensor.permute(order)


def out_of_memory_order(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """Undoes `in_memory`."""
    return tensor if order is None else tensor.permute([order.index(d) for d in range(len(order))])


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose elements fill its memory without gaps or overlaps: itself, or a contiguous copy."""
    return tensor if in_memory(tensor, memory_order(tensor)).is_contiguous() else tensor.contiguous()


def laid_out_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the memory order of a dense one of its shape: itself, or a copy."""
    if in_memory(tensor, memory_order(other)).is_contiguous():
        return tensor
    return torch.empty_like(other, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
