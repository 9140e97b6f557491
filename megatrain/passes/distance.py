"""The distance between two tensors, and how much of it a sum in another order explains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from megatrain.tracer.spec import dtype_name

# A sum whose terms are added in another order is off by a few units in the last place of its largest terms. The
# unit of single precision is 1.2e-7; the coarse types get less of a margin, or nothing would ever differ.
TOLERANCES = {
    torch.float64: 1e-13,
    torch.complex128: 1e-13,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
_CHUNK = 1 << 22


def tensor_distance(expected: torch.Tensor, found: torch.Tensor) -> tuple[float, str]:
    """Returns the largest absolute difference, and the difference in words if they can't be subtracted.

    NaN equals NaN. Flags and states of generators are equal or infinitely far apart.
    """
    for what, left, right in (
        ("shape", tuple(expected.shape), tuple(found.shape)),
        ("dtype", dtype_name(expected.dtype), dtype_name(found.dtype)),
        ("layout", str(expected.layout), str(found.layout)),
        ("requires_grad", expected.requires_grad, found.requires_grad),
    ):
        if left != right:
            return float("inf"), f"{what} {right} instead of {left}"
    left, right = _dense(expected), _dense(found)
    if torch.equal(left, right):
        return 0.0, ""
    if left.dtype in (torch.bool, torch.uint8):
        return float("inf"), f"{int((left != right).sum())} of {left.numel()} elements differ"
    gap = max(_gap(a, b) for a, b in zip(_chunks(left), _chunks(right), strict=True))
    return gap, "NaN or infinite on one side only" if gap == float("inf") else ""


def scale_by_kind(expected: Mapping[tuple[str, str], Any]) -> Callable[[tuple[str, str]], float]:
    """Returns what differences are relative to: the largest value of a tensor, or a hundredth of its kind's largest.

    Some gradients, such as that of a key projection's bias, are zero except for rounding.

    Args:
        expected: By `(kind, name)`; what is no tensor has no size.
    """
    sizes = {key: largest(value) for key, value in expected.items() if isinstance(value, torch.Tensor)}
    of_kinds: dict[str, float] = {}
    for (kind, _), size in sizes.items():
        of_kinds[kind] = max(of_kinds.get(kind, 0.0), size)
    return lambda key: max(sizes.get(key, 0.0), of_kinds.get(key[0], 0.0) / 100)


def largest(tensor: torch.Tensor) -> float:
    """Returns the largest finite absolute value; 0 if there is none."""
    sizes = [float(c.nan_to_num(0.0, 0.0, 0.0).max()) for c in _wide_chunks(tensor)]
    return max(sizes, default=0.0)


def has_nan(tensor: torch.Tensor) -> bool:
    """Tells whether anything in it is NaN."""
    return bool(_dense(tensor).isnan().any())


def _wide_chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Absolute values in double precision, piece by piece."""
    for chunk in _chunks(_dense(tensor)):
        if chunk.numel():
            yield chunk.to(torch.complex128 if chunk.is_complex() else torch.float64).abs()


def _gap(left: torch.Tensor, right: torch.Tensor) -> float:
    if left.numel() == 0:
        return 0.0
    wide = torch.complex128 if left.is_complex() else torch.float64
    gap = (left.to(wide) - right.to(wide)).abs()
    gap[(left.isnan() & right.isnan()) | (left == right)] = 0
    return float(gap.nan_to_num(nan=float("inf")).max())


def _chunks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.reshape(-1).split(_CHUNK)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().cpu()
    dense = dense if dense.layout == torch.strided else dense.to_dense()
    return dense.resolve_conj().resolve_neg()
