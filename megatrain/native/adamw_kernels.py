"""The functions of `adamw.c`: AdamW in one pass, over split masters or whole ones."""

from __future__ import annotations

from pathlib import Path

from megatrain.native.native_kernel import Argument, NativeKernel

LANES = 16
"""`adamw.c` takes multiples of this many elements."""

_SOURCE = Path(__file__).with_name("adamw.c")
# Gradient and whether it is bf16, two moments, scalars, number of elements, threads.
_OTHERS: tuple[Argument, ...] = ("tensor", "int32", "tensor", "tensor", "floats", "int64", "int32")
SPLIT = NativeKernel(_SOURCE, "adamw_split", ("tensor", "tensor", *_OTHERS))
WHOLE = NativeKernel(_SOURCE, "adamw_whole", ("tensor", *_OTHERS))
