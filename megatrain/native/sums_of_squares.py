"""The function of `squares.c`: the sums of the squares of tensors' elements, on several threads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from megatrain.native.native_kernel import NativeKernel

_PIECE = 1 << 18  # elements: enough for a thread to be worth it
SQUARES = NativeKernel(
    Path(__file__).with_name("squares.c"),
    "squares",
    ("tensor", "tensor", "tensor", "tensor", "int64", "int64", "int32"),
)
DTYPES = (torch.float32, torch.bfloat16)
"""Whose elements `sums_of_squares` takes."""


def sums_of_squares(tensors: Sequence[torch.Tensor], threads: int) -> list[float]:
    """Adds up the squares of the elements of each of several tensors, in fp64, runs of 64 squares in fp32.

    A result has the same bits for any number of threads, and whatever other tensors there are. `SQUARES.fault()` says
    whether it can be called here.

    Args:
        tensors: Contiguous, on the host, each of one of `DTYPES`.
        threads: How many share the work.
    """
    starts = [range(0, tensor.numel(), _PIECE) for tensor in tensors]
    facts = [(t.data_ptr(), t.numel(), int(t.dtype == torch.bfloat16)) for t in tensors]
    owners = [number for number, own in enumerate(starts) for _ in own]
    sums = torch.empty(len(owners), dtype=torch.float64)
    SQUARES(
        *(torch.tensor(each, dtype=torch.int64) for each in (facts, owners, [i for own in starts for i in own])),
        sums,
        len(owners),
        _PIECE,
        threads,
    )
    left = iter(sums.tolist())
    return [math.fsum(next(left) for _ in own) for own in starts]
