"""Three ways to keep a parameter's fp32 values: as they are, in two halves, or rounded to bf16 at random.

In halves, the high half is the bf16 value nearest to the master; an exact tie rounds away from zero. (With ties to
even, 65537 masters would share some high halves and 65535 others, and 16 bits could not tell them apart.) The low half
is the signed distance in units of the master's last place. Together they are the master's bits: `(high << 16) + low`. A
NaN becomes a quiet NaN, so that the high half shows it too.

A low half that belongs to another high half (after a write to the parameter that wasn't noticed) moves the value by at
most half the distance to the next bf16 value, so the master still rounds to the written value. Only with a zero or an
infinity as high half can the sum be NaN; then the high half counts alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

Order = tuple[int, ...] | None
"""Dimensions from the outermost in memory to the innermost; None where that is their own order."""


def memory_order(tensor: torch.Tensor) -> Order:
    """Returns the order in which the elements of a dense tensor fill its memory; see `dense`."""
    if tensor.is_contiguous():
        return None
    return tuple(sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d)))


def in_memory(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """Returns a view whose dimensions stand in that order: contiguous, if the tensor is laid out so."""
    return tensor if order is None else tensor.permute(order)


def out_of_memory_order(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """Undoes `in_memory`."""
    return tensor if order is None else tensor.permute([order.index(d) for d in range(len(order))])


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose elements fill its memory without gaps or overlaps: itself, or a contiguous copy."""
    return tensor if in_memory(tensor, memory_order(tensor)).is_contiguous() else tensor.contiguous()


def laid_out_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the memory order of a dense one of its shape: itself, or a copy."""
    if in_memory(tensor, memory_order(other)).is_contiguous():
        return tensor
    return torch.empty_like(other, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


CHUNK = 1 << 15
"""Elements per thread that are worked on at a time: their scratch stays in a core's own cache."""


@dataclass(frozen=True, slots=True, eq=False)
class WholeMaster:
    """An fp32 tensor that is its own master.

    Attributes:
        values: fp32, contiguous, on the host.
    """

    values: torch.Tensor

    def __post_init__(self) -> None:
        _check(self.values, torch.float32)

    @property
    def shape(self) -> torch.Size:
        """The parameter's."""
        return self.values.shape

    def part(self, start: int, end: int) -> WholeMaster:
        """Returns elements `start` to `end` of the flattened tensor, as views."""
        return WholeMaster(self.values.view(-1)[start:end])

    def load(self, values: torch.Tensor, spare: torch.Tensor) -> None:
        """Writes the fp32 values; `values` and `spare` (int32) are as long as this part."""
        values.copy_(self.values)

    def store(self, values: torch.Tensor, spare: torch.Tensor) -> None:
        """Takes fp32 values over."""
        self.values.copy_(values)


@dataclass(frozen=True, slots=True, eq=False)
class SplitMaster:
    """An fp32 tensor as two contiguous halves of the same shape, on the host.

    Attributes:
        high: bf16; the values that a block computes with.
        low: int16; the bits that `high` lacks.
    """

    high: torch.Tensor
    low: torch.Tensor

    def __post_init__(self) -> None:
        _check(self.high, torch.bfloat16)
        _check(self.low, torch.int16)
        assert self.high.shape == self.low.shape

    @classmethod
    def of(cls, master: torch.Tensor) -> SplitMaster:
        """Splits an fp32 tensor into new halves."""
        halves = cls(torch.empty(master.shape, dtype=torch.bfloat16), torch.empty(master.shape, dtype=torch.int16))
        write_(halves, master)
        return halves

    @property
    def shape(self) -> torch.Size:
        """The parameter's."""
        return self.high.shape

    def part(self, start: int, end: int) -> SplitMaster:
        """Returns elements `start` to `end` of the flattened tensor, as views."""
        return SplitMaster(self.high.view(-1)[start:end], self.low.view(-1)[start:end])

    def load(self, values: torch.Tensor, spare: torch.Tensor) -> None:
        """Writes the fp32 values; `values` and `spare` (int32) are as long as this part."""
        # Each conversion has its own memory: an addition of int32 and int16 would allocate some.
        values.copy_(self.high)
        spare.copy_(self.low)
        values.view(torch.int32).add_(spare)
        if _may_hold_nan(values):
            # If other code wrote the high half, the low half may not belong to it: see the module.
            is_nan = values.isnan()
            values[is_nan] = self.high[is_nan].float()

    def store(self, values: torch.Tensor, spare: torch.Tensor) -> None:
        """Takes fp32 values over."""
        bits = values.view(torch.int32)
        self.low.copy_(bits)
        torch.add(bits, 0x8000, out=spare)
        spare.bitwise_and_(-0x10000)
        self.high.copy_(spare.view(torch.float32))
        if _may_hold_nan(values):
            is_nan = values.isnan()
            self.high.view(torch.int16)[is_nan] = _quiet(bits[is_nan])
            self.low[is_nan] = 0


@dataclass(frozen=True, slots=True, eq=False)
class RoundedMaster:
    """A bf16 tensor that is its own master: updates are rounded up or down at random (stochastic rounding).

    The probability is the distance to the other neighbour, so the mean of many roundings is the value itself, and small
    updates are not lost on average. A generator draws for one master alone: the same seed and the same updates of this
    master give the same bits, for any number of threads and any order of other updates.

    Attributes:
        high: bf16, contiguous, on the host.
        generator: Where the bits come from; a generator of the CPU.
    """

    high: torch.Tensor
    generator: torch.Generator

    def __post_init__(self) -> None:
        _check(self.high, torch.bfloat16)

    @property
    def shape(self) -> torch.Size:
        """The parameter's."""
        return self.high.shape

    def part(self, start: int, end: int) -> RoundedMaster:
        """Returns elements `start` to `end` of the flattened tensor, as views."""
        return RoundedMaster(self.high.view(-1)[start:end], self.generator)

    def load(self, values: torch.Tensor, spare: torch.Tensor) -> None:
        """Writes the values as fp32."""
        values.copy_(self.high)

    def store(self, values: torch.Tensor, spare: torch.Tensor) -> None:
        """Takes fp32 values over, each rounded to one of its two neighbours."""
        bits = values.view(torch.int32)
        spare.random_(0, 1 << 16, generator=self.generator)
        spare.add_(bits).bitwise_and_(-0x10000)
        self.high.copy_(spare.view(torch.float32))
        if _may_hold_nan(values):
            is_nan = values.isnan()
            self.high.view(torch.int16)[is_nan] = _quiet(bits[is_nan])


Master = WholeMaster | SplitMaster | RoundedMaster


def pieces(numel: int) -> Iterator[tuple[int, int]]:
    """Yields the bounds of pieces whose scratch fits the caches of the threads that torch uses here."""
    # Bounds are multiples of 16, because torch's fused kernels round the last few elements of a tensor otherwise.
    size = CHUNK * torch.get_num_threads()
    for start in range(0, numel, size):
        yield start, min(numel, start + size)


@torch.no_grad()
def read_(out: torch.Tensor, master: Master) -> torch.Tensor:
    """Writes the fp32 values of a master into `out`, contiguous and of its shape, and returns it."""
    assert out.dtype == torch.float32
    assert out.shape == master.shape
    flat = out.view(-1)
    spare = torch.empty(min(flat.numel(), CHUNK * torch.get_num_threads()), dtype=torch.int32)
    for start, end in pieces(flat.numel()):
        master.part(start, end).load(flat[start:end], spare[: end - start])
    return out


@torch.no_grad()
def write_(master: Master, values: torch.Tensor) -> None:
    """Takes fp32 values of the master's shape over; needs a piece of scratch, not a copy."""
    assert values.dtype == torch.float32
    assert values.shape == master.shape
    flat = values.reshape(-1)
    spare = torch.empty(min(flat.numel(), CHUNK * torch.get_num_threads()), dtype=torch.int32)
    for start, end in pieces(flat.numel()):
        master.part(start, end).store(flat[start:end], spare[: end - start])


@torch.no_grad()
def set_halves(high: torch.Tensor, low: torch.Tensor, values: torch.Tensor) -> None:
    """Splits floating-point values into a bf16 and an int16 tensor of their shape, of any strides; for a piece."""
    halves = SplitMaster.of(values.to("cpu", torch.float32))
    high.copy_(halves.high)
    low.copy_(halves.low)


def _check(half: torch.Tensor, dtype: torch.dtype) -> None:
    assert half.dtype == dtype, f"{half.dtype} instead of {dtype}"
    assert half.is_contiguous()


def _may_hold_nan(values: torch.Tensor) -> bool:
    # One sum is a quarter of the price of a mask, and never finite where a NaN is.
    return not math.isfinite(values.sum().item())


def _quiet(bits: torch.Tensor) -> torch.Tensor:
    return (bits | 0x400000).bitwise_right_shift_(16).to(torch.int16)
