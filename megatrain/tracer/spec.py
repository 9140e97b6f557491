"""TensorSpec: what is known of a tensor without having it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megatrain.checks import checked, count, optional, sequence_of
from megatrain.errors import OptionError

_SHORT_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the short name of a dtype, `f32` for `torch.float32`."""
    return _SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))


_SIZES = sequence_of(count(), (tuple,), "a tuple")


@checked(shape=_SIZES, stride=optional(_SIZES))
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and layout of a strided tensor; prints as `f32[2, 16, 64]`.

    Args:
        shape: Sizes, one per dimension.
        dtype: Element type.
        stride: Strides in elements, or None for a contiguous tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.stride is not None and len(self.stride) != len(self.shape):
            raise OptionError(
                f"stride={self.stride} has {len(self.stride)} numbers, shape={self.shape} has {len(self.shape)}.\n"
                "  A stride has a number for each dimension.\n  Leave it out for a contiguous tensor."
            )

    @staticmethod
    @checked()
    def of(tensor: torch.Tensor) -> TensorSpec:
        """Reads the spec of `tensor`, real or fake."""
        stride = None
        if tensor.layout == torch.strided and not tensor.is_contiguous():
            stride = tuple(tensor.stride())
        return TensorSpec(tuple(tensor.shape), tensor.dtype, stride)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, stored densely."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        text = f"{dtype_name(self.dtype)}[{', '.join(map(str, self.shape))}]"
        return text if self.stride is None else f"{text} stride {self.stride}"
