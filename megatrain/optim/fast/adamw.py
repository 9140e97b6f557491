"""AdamW over masters, reading and writing each state once, with the bits of `torch.optim.AdamW` on fp32."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatrain.errors import OptimizerError
from megatrain.native.native_kernel import ADAMW, LANES
from megatrain.optim.fast.path import FastPath, ParameterUpdate, in_pieces
from megatrain.optim.masters.halves import Master, RoundedMaster, SplitMaster, WholeMaster, read_
from megatrain.optim.proxy import Optimizer, runs_torchs_code, step_code
from megatrain.torch_private import add_each, fused_adamw

_OF_A_THREAD = 1 << 17  # elements: to wake a thread takes as long as to update some ten thousand
Kernel = Literal["auto", "plain", "fused", "native"]


@dataclass(frozen=True, slots=True)
class AdamWOptions:
    """The numbers of one step of one param group; as `torch.optim.AdamW` names them."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> AdamWOptions:
        """Reads a param group.

        Raises:
            OptimizerError: For `amsgrad`, which has a third state, and `differentiable`.
        """
        for option in ("amsgrad", "differentiable"):
            if group.get(option):
                raise OptimizerError(
                    f"{option}=True has no fused update over bf16 parameters with masters.\n"
                    "  The masters are updated in pieces, with two moments and outside of autograd.\n"
                    f"  Set {option}=False, or train with precision='fp32'."
                )
        beta1, beta2 = group["betas"]
        numbers = (float(group[name]) for name in ("lr", "eps", "weight_decay"))
        lr, eps, weight_decay = numbers
        return cls(lr, (float(beta1), float(beta2)), eps, weight_decay, bool(group.get("maximize")))


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """The fp32 averages of one parameter, contiguous and of its shape."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    @property
    def both(self) -> tuple[torch.Tensor, torch.Tensor]:
        """First and second."""
        return self.exp_avg, self.exp_avg_sq

    @classmethod
    def zeros(cls, master: Master) -> Moments:
        """Returns the moments before the first step."""
        return cls(torch.zeros(master.shape), torch.zeros(master.shape))

    def part(self, start: int, end: int) -> Moments:
        """Returns elements `start` to `end` of the flattened tensors, as views."""
        return Moments(self.exp_avg.view(-1)[start:end], self.exp_avg_sq.view(-1)[start:end])


_Native = tuple[Master, torch.Tensor, Moments, tuple[float, ...]]
"""What the kernel updates: a master, its contiguous gradient and moments, and the scalars that `adamw.c` lists."""


@torch.no_grad()
def adamw_(
    master: Master,
    moments: Moments,
    gradient: torch.Tensor,
    *,
    step: int,
    options: AdamWOptions,
    scale: float = 1.0,
    kernel: Kernel = "auto",
    threads: int | None = None,
) -> None:
    """Updates a master and its moments in place.

    `kernel="plain"` has the bits of `torch.optim.AdamW(foreach=False)` on fp32 masters, the others those of
    `fused=True`. `"native"` is one pass over memory where a C compiler is at hand; `"auto"` is that, or else `"fused"`.

    Args:
        master: Whole, split, or rounded (which `"native"` doesn't know: `"auto"` is then `"fused"`).
        moments: Of the master's shape.
        gradient: Of the master's shape, fp32 or bf16; converted to fp32 before anything else. Not written to.
        step: Which step this is, from 1.
        options: Of the parameter's group.
        scale: Factor of the gradient, such as the coefficient of clipping; rounded to fp32.
        kernel: Which of the implementations.
        threads: How many threads `"native"` uses; None is as many as torch. The others use torch's.

    Raises:
        OptimizerError: If `"native"` was asked for and isn't available.
    """
    assert gradient.shape == master.shape
    scalars, done = _scalars(step, options, scale), 0
    if kernel in ("auto", "native") and _is_native(type(master), gradient.dtype):
        reason = native_reason()
        if reason is None:
            done = _in_c([(master, gradient, moments, scalars)], threads)
        elif kernel == "native":
            raise OptimizerError(f"kernel='native' isn't available: {reason}.\n  Use kernel='auto'.")
    update = _plain if kernel == "plain" else _fused
    for values, wide, both in in_pieces(master, gradient, moments.both, scale=scale, start=done):
        update(values, wide, Moments(*both), step, options)


def _is_native(master: type[Master], gradient: torch.dtype) -> bool:
    return master is not RoundedMaster and gradient in (torch.float32, torch.bfloat16)


@functools.cache
def native_reason() -> str | None:
    """Returns why `kernel="native"` isn't available on this machine, or None if it is.

    The kernel is built, and its bits compared with torch's: processors differ in what torch fuses.
    """
    reason = ADAMW.fault()
    if reason is not None:
        return reason
    generator = torch.Generator().manual_seed(0)
    for narrow, beta1 in ((False, 0.9), (True, 0.9), (False, 0.3)):
        options = AdamWOptions(1e-3, (beta1, 0.99), weight_decay=0.1)
        values = torch.randn(64 * LANES, generator=generator)
        masters = (SplitMaster.of(values), WholeMaster(values.clone()))
        states = [(master, Moments.zeros(master)) for master in masters]
        theirs = Moments.zeros(masters[0])
        for step in range(1, 4):
            gradient = torch.randn(values.shape, generator=generator).to(torch.bfloat16 if narrow else torch.float32)
            _fused(values, gradient.float(), theirs, step, options)
            for master, mine in states:
                _in_c([(master, gradient, mine, _scalars(step, options, 1.0))], 1)
        if not all(torch.equal(read_(torch.empty_like(values), master), values) for master in masters):
            return "its bits differ from those of torch's fused AdamW on this processor"
    return None


def _in_c(updates: Sequence[_Native], threads: int | None) -> int:
    """Updates tensors in place by one call, each as far as whole lanes go; returns how far, of the last one."""
    numbers, scalars, total, done = list[int](), list[float](), 0, 0
    for master, gradient, moments, own in updates:
        assert all([tensor.is_contiguous() for tensor in (gradient, *moments.both)])
        if isinstance(master, SplitMaster):
            values, low = master.high.data_ptr(), master.low.data_ptr()
        else:
            assert isinstance(master, WholeMaster)
            values, low = master.values.data_ptr(), 0
        done = gradient.numel() // LANES * LANES
        is_narrow = int(gradient.dtype == torch.bfloat16)
        numbers += (values, low, gradient.data_ptr(), is_narrow, *(m.data_ptr() for m in moments.both), done)
        scalars += own
        total += done
    ADAMW(numbers, scalars, len(updates), min(max(1, total // _OF_A_THREAD), threads or torch.get_num_threads()))
    return done


def _plain(values: torch.Tensor, gradient: torch.Tensor, moments: Moments, step: int, options: AdamWOptions) -> None:
    """The operations of `torch.optim.AdamW(foreach=False)`; writes into `gradient`."""
    (beta1, beta2), lr = options.betas, options.lr
    if options.maximize:
        gradient.neg_()
    if options.weight_decay != 0:
        values.mul_(1 - lr * options.weight_decay)
    moments.exp_avg.lerp_(gradient, 1 - beta1)
    moments.exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    # The gradient has been read: its memory takes the denominator.
    torch.sqrt(moments.exp_avg_sq, out=gradient).div_((1 - beta2**step) ** 0.5).add_(options.eps)
    values.addcdiv_(moments.exp_avg, gradient, value=-(lr / (1 - beta1**step)))


def _fused(values: torch.Tensor, gradient: torch.Tensor, moments: Moments, step: int, options: AdamWOptions) -> None:
    """Torch's own kernel."""
    fused_adamw(
        [values],
        [gradient],
        [moments.exp_avg],
        [moments.exp_avg_sq],
        [],
        [torch.tensor(float(step))],
        lr=options.lr,
        beta1=options.betas[0],
        beta2=options.betas[1],
        weight_decay=options.weight_decay,
        eps=options.eps,
        amsgrad=False,
        maximize=options.maximize,
    )


def _scalars(step: int, options: AdamWOptions, scale: float) -> tuple[float, ...]:
    (beta1, beta2), lr = options.betas, options.lr
    return (
        -scale if options.maximize else scale,
        1 - lr * options.weight_decay,
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**step) ** 0.5,
        options.eps,
        -lr / (1 - beta1**step),
    )


class AdamWInOnePass(FastPath):
    """AdamW over masters, with the bits of `fused=True` over fp32 parameters."""

    moments = ("exp_avg", "exp_avg_sq")
    numbers = ("step",)

    def matches(self, optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
        """Whether its step is AdamW's own, with options that the fused update has."""
        others = ("amsgrad", "capturable", "differentiable")
        is_adamw = step_code(type(optimizer)) is _ADAMW and runs_torchs_code(optimizer)
        return is_adamw and bool(group["decoupled_weight_decay"]) and not any(group[option] for option in others)

    def matches_whole(self, group: Mapping[str, Any]) -> bool:
        """Whether the group says `fused=True`: without it, AdamW over fp32 has other bits."""
        return bool(group["fused"])

    def options(self, group: Mapping[str, Any]) -> AdamWOptions:
        """Reads the numbers of a step."""
        return AdamWOptions.of(group)

    def update(self, given: ParameterUpdate) -> None:
        """Updates one parameter by `adamw_`."""
        (step,) = given.numbers
        step.add_(1)
        adamw_(
            given.master,
            Moments(*given.moments),
            given.gradient,
            step=int(step.item()),
            options=given.options,
            scale=given.scale,
            threads=given.threads,
        )

    def update_all(self, given: Sequence[ParameterUpdate]) -> None:
        """Updates the parameters of a block by one call of the native kernel, as far as it knows them."""
        native: list[ParameterUpdate] = []
        for each in given:
            if each.gradient.numel() % LANES or not self.is_sure(type(each.master), each.gradient.dtype):
                self.update(each)
            else:
                native.append(each)
        if not native:
            return
        add_each([each.numbers[0] for each in native], 1)
        rows: list[_Native] = []
        for each in native:
            scalars = _scalars(int(each.numbers[0].item()), each.options, each.scale)
            rows.append((each.master, each.gradient, Moments(*each.moments), scalars))
        _in_c(rows, given[0].threads)

    def is_sure(self, master: type[Master], gradient: torch.dtype) -> bool:
        """Whether the native kernel does it, which takes no memory."""
        return _is_native(master, gradient) and native_reason() is None


_ADAMW = step_code(torch.optim.AdamW)
