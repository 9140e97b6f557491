"""Narrowed: a tensor in bf16, with the data that restores the bits of the wider tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatrain.optim.masters.halves import SplitMaster, pieces, read_, write_
from megatrain.optim.masters.memory_order import dense, in_memory, memory_order


@dataclass(frozen=True, slots=True, eq=False)
class Narrowed:
    """An fp32 tensor in two halves, which together take as many bytes.

    Args:
        high: bf16.
        low: int16, the bits that `high` lacks, laid out like it; None on meta, and if `whole` is kept.
        ties: Where, in the order of memory, `high` is the lower one of two bf16 values at the same distance: 16 bits
            can't tell these values from their mirror images.
        whole: The tensor itself, if it isn't a dense one of fp32.
    """

    high: torch.Tensor
    low: torch.Tensor | None = None
    ties: torch.Tensor | None = None
    whole: torch.Tensor | None = None

    @staticmethod
    def of(wide: torch.Tensor, *, is_master: bool) -> Narrowed:
        """Narrows a tensor, which stays as it is.

        Args:
            wide: Any tensor of floating-point numbers.
            is_master: Round ties as `SplitMaster` does, so that the halves are one; else as torch does.
        """
        if wide.layout != torch.strided or wide.dtype != torch.float32:
            return Narrowed(wide.to(torch.bfloat16), whole=wide)
        values = dense(wide)
        high = torch.empty_like(values, dtype=torch.bfloat16, requires_grad=False)
        if wide.is_meta:
            return Narrowed(high)
        low = torch.empty_like(values, dtype=torch.int16, requires_grad=False)
        order = memory_order(values)
        write_(SplitMaster(in_memory(high, order), in_memory(low, order)), in_memory(values, order))
        ties = None if is_master else _round_ties(_flat(high), _flat(low), _flat(values))
        return Narrowed(high, low, ties)

    def widened(self) -> torch.Tensor:
        """Returns a tensor with the bits of the wider one."""
        if self.whole is not None:
            return self.whole
        wide = torch.empty_like(self.high, dtype=torch.float32)
        if self.low is None:
            return wide
        order = memory_order(wide)
        read_(in_memory(wide, order), SplitMaster(in_memory(self.high, order), in_memory(self.low, order)))
        if self.ties is not None:
            bits = _flat(self.high).view(torch.int16)[self.ties].int().bitwise_left_shift_(16)
            _flat(wide).view(torch.int32)[self.ties] = bits.add_(0x8000)
        return wide


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return in_memory(tensor, memory_order(tensor)).view(-1)


def _round_ties(high: torch.Tensor, low: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
    """Rounds as torch does, ties to even, and returns the places where the result differs."""
    found: list[torch.Tensor] = []
    for start, end in pieces(values.numel()):
        rounded = values[start:end].to(torch.bfloat16)
        is_other = rounded.view(torch.int16) != high[start:end].view(torch.int16)
        high[start:end] = rounded
        places = (is_other & (low[start:end] == -0x8000)).nonzero().view(-1)
        if places.numel():
            found.append(places.add_(start).to(torch.int32 if values.numel() < 2**31 else torch.int64))
    return torch.cat(found) if found else None
