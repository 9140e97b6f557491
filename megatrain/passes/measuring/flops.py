"""Counts the floating-point operations of a forward."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

_ATTENTION = [
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention") for kind in ("efficient", "flash", "cudnn")
]


def flop_counter() -> FlopCounterMode:
    """Returns torch's counter, to be entered; it prints nothing.

    The count of fused attention is our own: torch's refuses heads that share keys and values up to version 2.11.
    """
    return FlopCounterMode(display=False, custom_mapping=dict.fromkeys(_ATTENTION, _attention_flops))


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Two products for each head of the query: with the keys, and with the values."""
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[2] * (width + value[3])
