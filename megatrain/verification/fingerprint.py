"""Fingerprints of tensors, to find one among many without keeping them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatrain.device import is_on_host
from megatrain.verification.leaves import distinct_tensors


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Shape, dtype and three sums of a tensor, the third of which depends on the order of its elements.

    The sums are rounded on an accelerator, whose kernels may add in another order each time.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sums: tuple[str, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Fingerprint:
        """Reads a tensor."""
        dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
        digits = 17 if is_on_host(dense) else 4
        real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        with torch.no_grad():
            wide = real.cpu().to(torch.float64).reshape(-1)
            order = torch.arange(wide.numel(), dtype=torch.float64).mul_(0.7).cos_()
            wild = float((~wide.isfinite()).sum())
            wide = wide.nan_to_num(1.0, 2.0, -2.0)
            sums = (wild, float(wide.sum()), float(wide.square().sum()), float(wide @ order))
        return Fingerprint(tuple(tensor.shape), tensor.dtype, tuple(f"{s:.{digits}g}" for s in sums))


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module: its name, and the fingerprints of the tensors it returned."""

    name: str
    number: int
    outputs: tuple[Fingerprint, ...]


@contextmanager
def followed_calls(model: nn.Module) -> Generator[list[ModuleCall]]:
    """Collects the module calls of a forward, in the order in which they return."""
    calls: list[ModuleCall] = []
    counts: Counter[str] = Counter()

    def follow(name: str) -> Any:
        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            calls.append(ModuleCall(name, counts[name], tuple(map(Fingerprint.of, distinct_tensors(output)))))
            counts[name] += 1

        return note

    handles = [module.register_forward_hook(follow(name)) for name, module in model.named_modules()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
