"""AdamW on the device, over weights, low halves and moments that stay there, with the bits of the host's kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from megatrain.base import native
from megatrain.base.native.native_kernel import LANES
from megatrain.device import Device
from megatrain.hardware.work import UPDATE_PIECE
from megatrain.optim.fast.adamw import (
    AdamWInOnePass,
    AdamWOptions,
    adamw_,
    fused_update,
    native_reason,
    scalars_of,
)
from megatrain.optim.fast.path import fast_path
from megatrain.optim.masters.halves import SplitMaster, WholeMaster
from megatrain.optim.proxy import Optimizer

_MOST = 1 << 30  # elements of a launch


def why_not(
    optimizers: Sequence[Optimizer],
    trained: Iterable[torch.Tensor],
    *,
    device: Device | None = None,
    is_narrow: bool = False,
) -> str:
    """Says why a device can't update what optimizers train; empty if it can.

    Args:
        optimizers: In the order of their steps.
        trained: The parameters of the model that are trained.
        device: The compute device; None for a card that isn't there, which can.
        is_narrow: Whether parameters will be bf16, whatever they are now.
    """
    if wanted := [*map(id, trained)]:
        held = Counter(id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
        if any(held[parameter] != 1 for parameter in wanted):
            return "a trained parameter isn't one of exactly one group of an optimizer"
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            is_whole = not is_narrow and any(parameter.dtype == torch.float32 for parameter in group["params"])
            if type(fast_path(optimizer, group, is_whole=is_whole)) is not AdamWInOnePass:
                how = " with fused=True" if is_whole else ""
                return f"{type(optimizer).__name__} isn't torch's AdamW{how}, without amsgrad and capturable"
    if device is not None and kernel_on(device) is None:
        return f"{device} has no kernel with the bits of the host's updates"
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class StateThere:
    """One parameter and its state on the device, in the order of the parameter's memory, without dimensions.

    Args:
        values: fp32, or the bf16 high halves of exact masters.
        low: Their low halves, int16; None of an fp32 parameter.
        mean: fp32, like that below.
        square: The mean of the squares.
    """

    values: torch.Tensor
    low: torch.Tensor | None
    mean: torch.Tensor
    square: torch.Tensor

    @property
    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, in the order of the path's names."""
        return self.mean, self.square

    def part(self, start: int, end: int) -> StateThere:
        """Returns elements `start` to `end`, as views."""
        low = None if self.low is None else self.low[start:end]
        return StateThere(self.values[start:end], low, self.mean[start:end], self.square[start:end])


Kernel = Callable[[StateThere, torch.Tensor, int, AdamWOptions, float], None]
"""Updates state in place, as work of the current stream; takes a gradient, fp32 or bf16, the step's number, options,
and the factor of the gradient."""


@lru_cache(maxsize=16)
def kernel_on(device: Device) -> Kernel | None:
    """Returns the update on a device; None where none has the bits of the host's kernel.

    Tried are the kernel of this package, which the device compiles, and torch's fused one. Each proves its bits first.
    """
    if device.is_host or native_reason() is not None:
        return None
    compiled = device.kernel(source(), "adamw")
    tried = [*([] if compiled is None else [_by(compiled)]), _by_torch]
    return next((kernel for kernel in tried if _has_bits_of_host(kernel, device)), None)


def source() -> str:
    """The kernel for CUDA, whole."""
    folder = Path(native.__file__).parent
    step = (folder / "adamw_step.h").read_text(encoding="utf-8")
    return (folder / "adamw.cu").read_text(encoding="utf-8").replace('#include "adamw_step.h"', step)


def _by(compiled: Callable[..., None]) -> Kernel:
    def update(state: StateThere, gradient: torch.Tensor, step: int, options: AdamWOptions, scale: float) -> None:
        numbers = scalars_of(step, options, scale)
        is_narrow = int(gradient.dtype == torch.bfloat16)
        for start in range(0, gradient.numel(), _MOST):
            own, given = state.part(start, start + _MOST), gradient[start : start + _MOST]
            is_split, low = int(own.low is not None), own.values if own.low is None else own.low
            count = given.numel()
            compiled(count, own.values, low, given, own.mean, own.square, count, is_split, is_narrow, *numbers)

    return update


@torch.no_grad()
def _by_torch(state: StateThere, gradient: torch.Tensor, step: int, options: AdamWOptions, scale: float) -> None:
    """Torch's fused kernel, over pieces that are joined from halves and split again."""
    for start in range(0, gradient.numel(), UPDATE_PIECE):
        own, given = state.part(start, start + UPDATE_PIECE), gradient[start : start + UPDATE_PIECE].float() * scale
        values = own.values if own.low is None else _joined(own.values, own.low)
        fused_update(values, given, (own.mean, own.square), step, options)
        if own.low is not None:
            _split(values, own.values, own.low)


def _joined(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The fp32 values of masters in halves, as `join` of `adamw_step.h` makes them."""
    upper = high.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    bits = upper + low
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return torch.where(is_nan, upper, bits).view(torch.float32)


def _split(values: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    bits = values.view(torch.int32)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    # Of a NaN the upper half alone counts: a quiet one.
    bits = torch.where(is_nan, (bits | 0x400000) & -0x10000, bits)
    low.copy_(bits)
    rounded = torch.where(is_nan, bits, bits + 0x8000)
    high.view(torch.int16).copy_(rounded.bitwise_right_shift_(16))


@torch.no_grad()
def _has_bits_of_host(kernel: Kernel, device: Device) -> bool:
    """Compares three steps of each kind of parameter, gradient and beta with those of the host's kernel."""
    dice, count = torch.Generator().manual_seed(0), 256 * LANES
    for is_split in (False, True):
        for is_narrow, beta1 in ((False, 0.9), (True, 0.9), (True, 0.3)):
            values = torch.randn(count, generator=dice)
            values[:4] = torch.tensor([0.0, -0.0, float("inf"), float("nan")])
            master = SplitMaster.of(values) if is_split else WholeMaster(values)
            moments = torch.zeros(count), torch.zeros(count)
            kept = [master.high, master.low] if isinstance(master, SplitMaster) else [master.values]
            there = [tensor.to(device.torch_device, copy=True) for tensor in (*kept, *moments)]
            state = StateThere(there[0], there[1] if is_split else None, *there[-2:])
            for step, scale in enumerate((1.0, 0.3, 1.0), start=1):
                options = AdamWOptions(1e-3 * step, (beta1, 0.99), weight_decay=0.1)
                options = replace(options, maximize=step == 3)
                gradient = torch.randn(count, generator=dice).to(torch.bfloat16 if is_narrow else torch.float32)
                adamw_(master, moments, gradient, step=step, options=options, scale=scale, threads=1)
                kernel(state, gradient.to(device.torch_device), step, options, scale)
            pairs = zip((*kept, *moments), there, strict=True)
            if not all(_same_bits(mine, its.cpu()) for mine, its in pairs):
                return False
    return True


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
