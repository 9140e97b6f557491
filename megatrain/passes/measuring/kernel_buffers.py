"""Buffers that kernels allocate for themselves: a run on fake tensors doesn't show them."""

from __future__ import annotations

import math
from typing import Any

import torch

# Rows of a query are taken in groups of so many, and elements of a head in groups of so many.
_ROWS = 128
_ELEMENTS = 32
_FP32 = 4

# Backwards of attention on accelerators, with the place of the query's sequence among its dimensions.
_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_backward": 2,
    "aten::_scaled_dot_product_efficient_attention_backward": 2,
    "aten::_scaled_dot_product_cudnn_attention_backward": 2,
    "aten::_flash_attention_backward": 1,
    "aten::_efficient_attention_backward": 1,
    "aten::_cudnn_attention_backward": 2,
}


PACKED_PRODUCT = "bitsandbytes::gemm_4bit"
"""Of inputs and a weight of 4 bits: its shape is the third argument, the elements of a block are the fifth."""


def private_bytes(func: Any, args: Any) -> int:
    """Bytes that a kernel takes while it runs, beyond its results; 0 where none are known.

    The backwards of fused attention sum the query's gradient in fp32, with rows and heads rounded up, and have one
    fp32 number per row for the softmax. Where several heads share keys and values, each has a gradient of its own of
    these at first. cuDNN's RNNs copy their weights into one piece of memory. A product with 4-bit weights may make them
    in full, with the scales of their blocks in fp32, twice where these are quantized as well.

    Args:
        func: The overload of an operator.
        args: Its arguments; the query, or the list of weights, is the second, then come keys and values.
    """
    if func._schema.name == PACKED_PRODUCT:
        elements = math.prod(args[2])
        return elements * args[0].element_size() + 2 * _FP32 * (elements // args[4])
    if func._schema.name == "aten::_cudnn_rnn":
        return sum(weight.nbytes for weight in args[1])
    place = _ATTENTION.get(func._schema.name)
    if place is None:
        return 0
    query, key, value = args[1], args[2], args[3]
    if query.dim() == 3:  # sequences of several lengths, one after the other; their number is that of the bounds less 1
        (rows, heads, width), batch, kv_heads = query.shape, 1, key.shape[1]
        rows += _ROWS * max(0, _length(args[6]) - 1)
    else:
        batch, rows, heads, width = query.shape[0], query.shape[place], query.shape[3 - place], query.shape[3]
        kv_heads = key.shape[3 - place]
    of_rows = batch * heads * _rounded(rows, _ROWS) * _FP32
    shared = (key.nbytes + value.nbytes) * heads // kv_heads if kv_heads < heads else 0
    return of_rows * _rounded(width, _ELEMENTS) + of_rows + shared


def _rounded(number: int, group: int) -> int:
    return -(-number // group) * group


def _length(bounds: Any) -> int:
    return bounds.shape[0] if isinstance(bounds, torch.Tensor) and bounds.dim() == 1 else 0
