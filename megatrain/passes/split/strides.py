"""Strides: the memory of a tensor that may have gaps, or elements that are one in memory."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.tracer.spec import TensorSpec


def carried_shape(shape: Sequence[int], stride: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shape and strides of the elements that lie apart in memory: expanded dimensions have one.

    Returns:
        None if other elements lie in the same memory.
    """
    apart = tuple(1 if jump == 0 and size > 0 else size for size, jump in zip(shape, stride, strict=True))
    end = 0
    for size, jump in sorted(zip(apart, stride, strict=True), key=lambda pair: pair[1]):
        if size > 1 and jump <= end:
            return None
        end += max(0, size - 1) * jump
    return apart, tuple(stride)


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last in memory."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * jump for size, jump in zip(shape, stride, strict=True))


def span_bytes(spec: TensorSpec) -> int | None:
    """Bytes of a storage that holds a tensor with its own strides; None if it overlaps itself."""
    if spec.stride is None:
        return spec.nbytes
    if carried_shape(spec.shape, spec.stride) is None:
        return None
    return span(spec.shape, spec.stride) * spec.dtype.itemsize
