"""moved(): where the dimensions of a tensor are in a view of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from megatrain.passes.rewriting.call_trial import called
from megatrain.tracer.recording.effect_watch import storage_key


@dataclass(frozen=True, slots=True)
class Moved:
    """A view, by the dimensions of the tensor, all counted from the last.

    Args:
        starts: The first index along each dimension of the tensor.
        places: The dimension of the view, and its step, for each dimension of the tensor that it still has.
    """

    starts: dict[int, int]
    places: dict[int, tuple[int, int]]


def moved(node: fx.Node, shape: Sequence[int], others: dict[fx.Node, Sequence[int]]) -> Moved | None:
    """Reads from strides where a view's elements come from; None if the call makes no view of its first operand.

    The tensor is given strides of which no two combinations are equal.

    Args:
        node: The call.
        shape: Of its first operand.
        others: The shapes of further operands, of which the call reads nothing else.
    """
    dims = range(len(shape))
    strides = [math.prod(size + 1 for size in shape[dim + 1 :]) for dim in dims]
    tensor = torch.empty_strided(tuple(shape), strides, device="meta")

    def stand_in(operand: fx.Node) -> torch.Tensor:
        return tensor if operand is node.args[0] else torch.empty(tuple(others[operand]), device="meta")

    try:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), stand_in)  # pyright: ignore
        view: Any = called(node.target, args, kwargs)  # pyright: ignore
    except Exception:  # an index that isn't known, or a view that these strides don't allow: nothing is claimed
        return None
    if not isinstance(view, torch.Tensor) or storage_key(view) != storage_key(tensor):
        return None
    rest, starts = int(view.storage_offset()), dict[int, int]()
    for dim in dims:
        starts[dim - len(shape)], rest = divmod(rest, strides[dim])
    places: dict[int, tuple[int, int]] = {}
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if size > 1 and stride > 0:
            origin = next(index for index in dims if strides[index] <= stride)
            if stride % strides[origin]:
                return None
            places[origin - len(shape)] = dim - view.dim(), stride // strides[origin]
    return Moved(starts, places)
