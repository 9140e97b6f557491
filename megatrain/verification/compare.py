"""The distance between tensors, and the tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.passes.program import Program
from megatrain.tracer.spec import dtype_name
from megatrain.verification.leaves import differ
from megatrain.verification.report import Difference
from megatrain.verification.trial import Key

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


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much of a relative difference counts as equal.

    Whole numbers, flags, texts and generator states have to be equal.

    Args:
        given: The user's; None goes by dtype.
        coarsest: At least this much for every floating dtype: that of the autocast regions of the forward. Eager
            casts a weight once and adds its gradients in the coarse dtype, blocks add them after casting back.
    """

    given: float | None = None
    coarsest: float = 0.0

    @staticmethod
    def of(given: float | None, program: Program) -> Tolerance:
        """Reads the autocast regions off a program."""
        nodes = (node for template in program.templates.values() for node in template.graph.nodes)
        dtypes = {dtype for node in nodes for _, dtype in node.meta.get("autocast", ())}
        return Tolerance(given, max((TOLERANCES.get(d, 0.0) for d in dtypes), default=0.0))

    def of_value(self, value: Any) -> float:
        """Returns what holds for a tensor, or for any other value."""
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            return 0.0
        return max(TOLERANCES.get(value.dtype, 0.0), self.coarsest) if self.given is None else self.given


def compare(
    expected: Mapping[Key, Any],
    found: Mapping[Key, Any],
    step: int,
    tolerance: Tolerance,
    blocks_of: Callable[[str, str], tuple[str, ...]] = lambda _kind, _name: (),
) -> Iterator[Difference]:
    """Compares two observations entry by entry.

    Args:
        expected: Of eager PyTorch.
        found: Of the compiled model.
        step: Number of the step.
        tolerance: Differences that count as equal.
        blocks_of: Names the blocks of a `(kind, name)`.
    """
    sizes = {key: largest(value) for key, value in expected.items() if isinstance(value, torch.Tensor)}
    scales: dict[str, float] = {}
    for (kind, _), size in sizes.items():
        scales[kind] = max(scales.get(kind, 0.0), size)
    for key in dict.fromkeys([*expected, *found]):
        kind, name = key
        absolute, reason = _apart(expected, found, key)
        scale = max(sizes.get(key, 0.0), scales.get(kind, 0.0) / 100)
        relative = absolute / scale if scale and absolute else absolute
        allowed = tolerance.of_value(expected.get(key))
        yield Difference(kind, name, step, absolute, relative, blocks_of(kind, name), allowed, reason)


def _apart(expected: Mapping[Key, Any], found: Mapping[Key, Any], key: Key) -> tuple[float, str]:
    if key not in found:
        return float("inf"), "missing"
    if key not in expected:
        return float("inf"), "eager PyTorch has nothing of that name"
    return distance(expected[key], found[key])


def distance(expected: Any, found: Any) -> tuple[float, str]:
    """Returns the largest absolute difference, and the difference in words if they can't be subtracted.

    NaN equals NaN. Generator states and flags are equal or infinitely far apart.
    """
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        reason = differ(expected, found)
        return (float("inf"), reason) if reason else (0.0, "")
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


def scale_of(value: Any) -> float:
    """Returns what a difference is relative to: a tensor's largest finite absolute value, or 1."""
    return (largest(value) if isinstance(value, torch.Tensor) else 0.0) or 1.0


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
