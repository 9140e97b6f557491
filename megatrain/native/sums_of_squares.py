"""The function of `squares.c`: the sum of the squares of a tensor's elements, on several threads."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from megatrain.native.native_kernel import NativeKernel

_PIECE = 1 << 16  # elements: enough for a thread to be worth it
SQUARES = NativeKernel(
    Path(__file__).with_name("squares.c"), "squares", ("tensor", "int32", "tensor", "int64", "int64", "int32")
)
DTYPES = (torch.float32, torch.bfloat16)
"""Whose elements `sum_of_squares` takes."""


def sum_of_squares(elements: torch.Tensor, threads: int) -> float:
    """Adds up the squares of the elements of a contiguous tensor of the host, of one of `DTYPES`, in fp64.

    The result has the same bits for any number of threads. `SQUARES.fault()` says whether it can be called here.
    """
    sums = torch.empty(-(-elements.numel() // _PIECE), dtype=torch.float64)
    SQUARES(elements, int(elements.dtype == torch.bfloat16), sums, elements.numel(), _PIECE, threads)
    return math.fsum(sums.tolist())
