"""AdamW over masters, reading and writing each state once, with the bits of `torch.optim.AdamW` on fp32."""

from __future__ import annotations

import ctypes
import functools
from abc import abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from megatrain.base.native.native_kernel import ADAMW, LANES, NativeKernel
from megatrain.base.torch_private import fused_adamw
from megatrain.device import is_on_host
from megatrain.errors import OptimizerError
from megatrain.optim.fast.path import FastPath, ParameterUpdate, PreparedUpdate, in_pieces
from megatrain.optim.masters.halves import Master, RoundedMaster, SplitMaster, WholeMaster, read_
from megatrain.optim.proxy import Optimizer, runs_torchs_code, step_code

_OF_A_THREAD = 1 << 17  # elements: to wake a thread takes as long as to update some ten thousand
_SCALARS = 8  # of a tensor, as `adamw.c` lists them
Moments = tuple[torch.Tensor, torch.Tensor]
"""The averages of one parameter's gradients, and of their squares."""


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


@torch.no_grad()
def adamw_(
    master: Master,
    moments: Moments,
    gradient: torch.Tensor,
    *,
    step: int,
    options: AdamWOptions,
    scale: float = 1.0,
    threads: int | None = None,
) -> None:
    """Updates a master and its moments in place, with the bits of `torch.optim.AdamW(fused=True)` on fp32 masters.

    That is one pass over memory in C as far as its lanes go, where a compiler is at hand; else torch's own kernel.

    Args:
        master: Whole, split, or rounded, which only torch's kernel knows.
        moments: fp32, contiguous and of the master's shape.
        gradient: Of the master's shape, fp32 or bf16; converted to fp32 before anything else. Not written to.
        step: Which step this is, from 1.
        options: Of the parameter's group.
        scale: Factor of the gradient, such as the coefficient of clipping; rounded to fp32.
        threads: How many threads the function of C uses; None is as many as torch. Torch's kernel uses torch's.
    """
    assert gradient.shape == master.shape
    done = 0
    if is_native(type(master), gradient.dtype) and native_reason() is None:
        done = gradient.numel() // LANES * LANES
        InC(ADAMW, LANES, [(master, moments, gradient)])([gradient], [scalars_of(step, options, scale)], threads)
    for values, wide, (mean, square) in in_pieces(master, gradient, moments, scale=scale, start=done):
        fused_update(values, wide, (mean, square), step, options)


def is_native(master: type[Master], gradient: torch.dtype) -> bool:
    """Tells whether the native kernels know masters and gradients of these kinds."""
    return master is not RoundedMaster and gradient in (torch.float32, torch.bfloat16)


class InC:
    """Updates of tensors by one call into C, each as far as whole lanes go.

    Args:
        kernel: `adamw.c`, or one that takes its arguments with other state.
        lanes: It takes multiples of so many elements.
        given: Masters, their state in the kernel's order, and gradients like those to come; all contiguous.
    """

    def __init__(
        self, kernel: NativeKernel, lanes: int, given: Sequence[tuple[Master, Sequence[torch.Tensor], torch.Tensor]]
    ):
        numbers, total = list[int](), 0
        for master, state, gradient in given:
            assert all([tensor.is_contiguous() for tensor in (gradient, *state)])
            if isinstance(master, SplitMaster):
                values, low = master.high.data_ptr(), master.low.data_ptr()
            else:
                assert isinstance(master, WholeMaster)
                values, low = master.values.data_ptr(), 0
            done = gradient.numel() // lanes * lanes
            is_narrow = int(gradient.dtype == torch.bfloat16)
            numbers += (values, low, gradient.data_ptr(), is_narrow, *(tensor.data_ptr() for tensor in state), done)
            total += done
        # All that a call would look up or convert: the thread that launches waits for Python of other threads.
        self._function, self._given, self._width = kernel.loaded(), len(given), len(numbers) // len(given)
        self._numbers, self._scalars = array("q", numbers), array("f", bytes(4 * _SCALARS * len(given)))
        self._addresses = self._numbers.buffer_info()[0], self._scalars.buffer_info()[0]
        self._most_threads = max(1, total // _OF_A_THREAD)

    def __call__(
        self, gradients: Sequence[torch.Tensor], scalars: Sequence[tuple[float, ...]], threads: int | None
    ) -> None:
        """Updates by these gradients and by the numbers of `scalars_of`, one for all or one for each."""
        self._numbers[2 :: self._width] = array("q", [gradient.data_ptr() for gradient in gradients])
        each = array("f", chain.from_iterable(scalars))
        self._scalars[:] = each * (self._given // len(scalars))
        number = min(self._most_threads, threads or torch.get_num_threads())
        self._function(*self._addresses, self._given, number)


class PreparedInC:
    """`FastPath.prepare` of a native kernel whose first number is the step; see `PreparedUpdate`."""

    def __init__(self, in_c: InC, given: Sequence[ParameterUpdate]):
        self._in_c = in_c
        self._steps = [ctypes.c_float.from_address(each.numbers[0].data_ptr()) for each in given]
        self._threads = given[0].threads

    def __call__(self, gradients: Sequence[torch.Tensor], options: Sequence[Any], scales: Sequence[float]) -> None:
        """Takes one more step."""
        for step in self._steps:
            step.value += 1
        numbers, own, scale = [step.value for step in self._steps], options[0], scales[0]
        if all([each is own for each in options]) and {*numbers} == {numbers[0]} and {*scales} == {scale}:
            scalars = [scalars_of(int(numbers[0]), own, scale)]
        else:
            triples = zip(numbers, options, scales, strict=True)
            scalars = [scalars_of(int(number), each, factor) for number, each, factor in triples]
        self._in_c(gradients, scalars, self._threads)


def fused_update(
    values: torch.Tensor, gradient: torch.Tensor, moments: Moments, step: int, options: AdamWOptions
) -> None:
    """Torch's own kernel; all tensors are fp32 and flat, and on one device."""
    fused_adamw(
        [values],
        [gradient],
        [moments[0]],
        [moments[1]],
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


def scalars_of(step: int, options: AdamWOptions, scale: float) -> tuple[float, ...]:
    """The numbers of an update, as `adamw.c` lists them."""
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


class InOnePass(FastPath):
    """An update by a function of C, as far as whole lanes of a parameter go.

    Attributes:
        kernel: The function.
        lanes: It takes multiples of so many elements.
    """

    kernel: NativeKernel
    lanes: int

    @abstractmethod
    def fault(self) -> str | None:
        """Returns why the function isn't used on this machine, or None if it is: its bits are torch's."""

    @abstractmethod
    def by_torch(
        self, values: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, Any], step: int, options: AdamWOptions
    ) -> None:
        """Updates flat fp32 values and their state by torch's operations."""

    def in_c(self, given: Sequence[ParameterUpdate]) -> InC:
        """One call of the function for several parameters."""
        state = [(each.master, (*each.moments, *each.numbers[1:]), each.gradient) for each in given]
        return InC(self.kernel, self.lanes, state)

    def prepare(self, given: Sequence[ParameterUpdate]) -> PreparedUpdate | None:
        """Prepares one call, if the function does all of it."""
        return PreparedInC(self.in_c(given), given) if all(map(self._is_whole, given)) else None

    def _is_whole(self, given: ParameterUpdate) -> bool:
        step = given.numbers[0]
        is_sure = self.is_sure(type(given.master), given.gradient.dtype)
        return is_sure and not given.gradient.numel() % self.lanes and step.dtype == torch.float32 and is_on_host(step)

    def is_sure(self, master: type[Master], gradient: torch.dtype) -> bool:
        """Whether the function does it, which takes no memory."""
        return is_native(master, gradient) and self.fault() is None

    def found_fault(self) -> str | None:
        """Builds the function, and compares its bits with torch's: processors differ in what torch fuses."""
        reason = self.kernel.fault()
        if reason is not None:
            return reason
        generator = torch.Generator().manual_seed(0)
        for dtype, beta1 in ((torch.float32, 0.9), (torch.bfloat16, 0.9), (torch.float32, 0.3)):
            options = AdamWOptions(1e-3, (beta1, 0.99), weight_decay=0.1)
            values = torch.randn(64 * self.lanes, generator=generator)
            masters = (SplitMaster.of(values), WholeMaster(values.clone()))
            theirs, *ours = (self.new_state(values) for _ in range(1 + len(masters)))
            for step in range(1, 4):
                gradient = torch.randn(values.shape, generator=generator).to(dtype)
                self.by_torch(values, gradient.float(), theirs, step, options)
                for master, state in zip(masters, ours, strict=True):
                    moments, numbers = (tuple(state[name] for name in names) for names in (self.moments, self.numbers))
                    given = ParameterUpdate(master, gradient, moments, numbers, options)
                    self.in_c([given])([gradient], [scalars_of(step, options, 1.0)], 1)
            is_alike = all(torch.equal(read_(torch.empty_like(values), master), values) for master in masters)
            names = (*self.moments, *self.numbers[1:])
            if not is_alike or any(not torch.equal(state[name], theirs[name]) for state in ours for name in names):
                return "its bits differ from those of torch's operations on this processor"
        return None


class AdamWInOnePass(InOnePass):
    """AdamW over masters, with the bits of `fused=True` over fp32 parameters."""

    moments = ("exp_avg", "exp_avg_sq")
    numbers = ("step",)
    kernel, lanes = ADAMW, LANES

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
        (step,), (mean, square) = given.numbers, given.moments
        step.add_(1)
        numbers: dict[str, Any] = {"step": int(step.item()), "options": given.options, "scale": given.scale}
        adamw_(given.master, (mean, square), given.gradient, **numbers, threads=given.threads)

    def fault(self) -> str | None:
        """As `native_reason`."""
        return native_reason()

    def by_torch(
        self, values: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, Any], step: int, options: AdamWOptions
    ) -> None:
        """By torch's fused kernel."""
        fused_update(values, gradient, (state["exp_avg"], state["exp_avg_sq"]), step, options)


@functools.cache
def native_reason() -> str | None:
    """Returns why AdamW isn't updated by one pass in C on this machine, or None if it is."""
    return AdamWInOnePass().found_fault()


_ADAMW = step_code(torch.optim.AdamW)
