"""The differences between two observations, and the tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.passes.distance import TOLERANCES, largest, scale_by_kind, tensor_distance
from megatrain.passes.program import Program
from megatrain.verification.leaves import differ
from megatrain.verification.report import Difference
from megatrain.verification.trial import Key


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much of a relative difference counts as equal.

    Whole numbers, flags, texts and generator states have to be equal.

    Args:
        given: The user's; None goes by dtype.
        coarsest: At least this much for every floating dtype: that of the autocast regions of the forward. Eager
            casts a weight once and adds its gradients in the coarse dtype, blocks add them after casting back.
        terms: How many roundings add up.
    """

    given: float | None = None
    coarsest: float = 0.0
    terms: int = 1

    @staticmethod
    def of(given: float | None, program: Program, kernels: str = "eager") -> Tolerance:
        """Reads the autocast regions off a program.

        Args:
            given: See `Tolerance`.
            program: What runs.
            kernels: If they aren't eager's own, each block rounds otherwise, and what is allowed is allowed for each.
        """
        nodes = (node for template in program.templates.values() for node in template.graph.nodes)
        dtypes = {dtype for node in nodes for _, dtype in node.meta.get("autocast", ())}
        terms = 1 if kernels == "eager" else len(program.blocks)
        return Tolerance(given, max((TOLERANCES.get(d, 0.0) for d in dtypes), default=0.0), terms)

    def of_value(self, value: Any) -> float:
        """Returns what holds for a tensor, or for any other value."""
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            return 0.0
        by_dtype = max(TOLERANCES.get(value.dtype, 0.0), self.coarsest) * self.terms
        return by_dtype if self.given is None else self.given


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
    scale_of_key = scale_by_kind(expected)
    for key in dict.fromkeys([*expected, *found]):
        kind, name = key
        absolute, reason = _apart(expected, found, key)
        scale = scale_of_key(key)
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
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        return tensor_distance(expected, found)
    reason = differ(expected, found)
    return (float("inf"), reason) if reason else (0.0, "")


def scale_of(value: Any) -> float:
    """Returns what a difference is relative to: a tensor's largest finite absolute value, or 1."""
    return (largest(value) if isinstance(value, torch.Tensor) else 0.0) or 1.0
