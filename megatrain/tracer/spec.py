"""TensorSpec: what is known of a tensor without having it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megatrain.device import HOST, is_on_host

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


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype, layout and place of a strided tensor; prints as `f32[2, 16, 64]`, or `i64[3] cpu` on the host.

    Args:
        shape: Sizes, one per dimension.
        dtype: Element type.
        stride: Strides in elements, or None for a contiguous tensor.
        on_host: A tensor of the CPU in a model that computes on another device. If the model computes on the CPU,
            there is one kind of tensors only, and this is False.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None
    on_host: bool = False

    @staticmethod
    def of(tensor: torch.Tensor, device: torch.device | None = None) -> TensorSpec:
        """Reads the spec of `tensor`, real or fake.

        Args:
            tensor: The tensor.
            device: Where the model computes; None where it doesn't matter, as for state, which is kept on the host and
                read on the device.
        """
        stride = None
        if tensor.layout == torch.strided and not tensor.is_contiguous():
            stride = tuple(tensor.stride())
        on_host = device is not None and is_on_host(tensor) and not is_on_host(device)
        return TensorSpec(tuple(tensor.shape), tensor.dtype, stride, on_host)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Makes a tensor of this spec without values: on `device`, where the model computes, or on the host."""
        place = HOST.torch_device if self.on_host else device
        if self.stride is None:
            return torch.empty(self.shape, dtype=self.dtype, device=place)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=place)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, stored densely."""
        return self.numel * self.dtype.itemsize

    @property
    def device_bytes(self) -> int:
        """The part of `nbytes` that takes memory of the device: none on the host."""
        return 0 if self.on_host else self.nbytes

    def __str__(self) -> str:
        text = f"{dtype_name(self.dtype)}[{', '.join(map(str, self.shape))}]"
        stride = "" if self.stride is None else f" stride {self.stride}"
        return f"{text}{stride}{' cpu' if self.on_host else ''}"
