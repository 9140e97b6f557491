"""AdamW8bit: AdamW whose moments are codes of 8 bits, read, updated and written again in one pass with masters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from megatrain.base.native.native_kernel import ADAMW_8BIT
from megatrain.errors import OptimizerError
from megatrain.files.optimizers import Conversion, conversions
from megatrain.optim.fast.adamw import AdamWOptions, InC, InOnePass, is_native, scalars_of
from megatrain.optim.fast.codes import (
    CODES,
    GROUP,
    SCALES,
    check_parameter,
    coded_from,
    coded_state,
    exact_state,
    new_state,
    update_,
)
from megatrain.optim.fast.path import ParameterUpdate, in_pieces
from megatrain.optim.proxy import Optimizer, step_code


class AdamW8bit(torch.optim.AdamW):
    """AdamW with moments of 8 bits: with bf16 weights and exact fp32 masters, 6.2 bytes a parameter instead of 12.

    What an update computes is AdamW in fp32; only what is kept of the moments until the next step is rounded, to the
    nearest code. See docs/precision.md for what the rounding costs. Deterministic: codes follow from gradients.

    An exact state of `torch.optim.AdamW` may be loaded: its moments are encoded. A checkpoint of megatrain also goes on
    with `torch.optim.AdamW`: its moments are decoded.

    Args:
        params: Parameters, or groups of them, as of any optimizer of torch.
        lr: Learning rate.
        betas: Of the two averages.
        eps: Added to the root of the second one.
        weight_decay: Decoupled, as in AdamW.
        maximize: Whether to go up instead of down.

    Raises:
        OptimizerError: In a step, of a parameter that isn't contiguous (groups are counted in the order of memory) or
            of another dtype than fp32, bf16 and fp16; or of a sparse gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Takes a step over all parameters that have a gradient.

        Args:
            closure: Computes the loss again, with gradients.

        Returns:
            The loss, if there is a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            check_options(group)
            options = AdamWOptions.of(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, options)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, options: AdamWOptions) -> None:
        check_parameter(parameter)
        if gradient.layout != torch.strided:
            raise OptimizerError(
                f"the gradient of a {tuple(parameter.shape)} parameter is {gradient.layout}.\n"
                "  AdamW8bit updates all elements, by dense gradients.\n"
                "  Make the embedding with sparse=False, or give it to torch.optim.SparseAdam in a list of optimizers."
            )
        state = self.state[parameter]
        if not state:
            state.update(new_state(parameter))
        state["step"] += 1
        values = parameter.detach().float().view(-1)
        scalars = scalars_of(int(state["step"].item()), options, 1.0)
        update_(values, gradient.float().reshape(-1), coded_state(state), scalars)
        if parameter.dtype != torch.float32:
            parameter.detach().view(-1).copy_(values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads its own state, or that of `torch.optim.AdamW`, whose moments are encoded."""
        loaded = [state_dict]
        # The last hook sees what the others have made of it; torch converts all state to the dtype of its parameter.
        hook = self.register_load_state_dict_pre_hook(lambda _, found: loaded.__setitem__(0, found))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        given = loaded[0]["state"]
        ids = [key for group in loaded[0]["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(ids, parameters, strict=True):
            if given.get(key):
                self.state[parameter] = coded_from(given[key], parameter)


def check_options(group: Mapping[str, Any]) -> None:
    """Refuses options of AdamW that there is no code for.

    Raises:
        OptimizerError: For `amsgrad`, a third moment, and for `capturable` and `differentiable`.
    """
    for option in ("amsgrad", "capturable", "differentiable"):
        if group.get(option):
            raise OptimizerError(
                f"AdamW8bit has no {option}=True.\n"
                "  It keeps two moments in codes, and updates outside of autograd and of CUDA graphs.\n"
                f"  Set {option}=False, or use torch.optim.AdamW."
            )


class AdamW8bitInOnePass(InOnePass):
    """AdamW8bit over masters or fp32 parameters: the bits of `AdamW8bit.step` over fp32 parameters on a CPU."""

    moments = tuple(CODES)
    numbers = ("step", *SCALES)
    dtypes = CODES
    kernel, lanes = ADAMW_8BIT, GROUP

    def matches(self, optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
        """Whether its step is AdamW8bit's own."""
        del group
        return step_code(type(optimizer)) is _STEP

    def options(self, group: Mapping[str, Any]) -> AdamWOptions:
        """Reads the numbers of a step."""
        check_options(group)
        return AdamWOptions.of(group)

    def new_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Makes codes and scales of zero.

        Raises:
            OptimizerError: If the parameter isn't contiguous.
        """
        check_parameter(parameter)
        return new_state(parameter)

    def update(self, given: ParameterUpdate) -> None:
        """Updates one parameter, as far as whole groups go by the native kernel, where there is one."""
        step, mean_scales, root_scales = given.numbers
        step.add_(1)
        _check_scales(given)
        done, numbers = 0, scalars_of(int(step.item()), given.options, given.scale)
        if is_native(type(given.master), given.gradient.dtype) and native_reason() is None:
            done = given.gradient.numel() // GROUP * GROUP
            self.in_c([given])([given.gradient], [numbers], given.threads)
        codes = [moment.view(-1)[done:] for moment in given.moments]
        scales = [each[done // GROUP :] for each in (mean_scales, root_scales)]
        at = 0
        for values, wide, _ in in_pieces(given.master, given.gradient, (), start=done):
            own, groups = slice(at, at + values.numel()), slice(at // GROUP, -(-(at + values.numel()) // GROUP))
            coded = codes[0][own], codes[1][own], scales[0][groups], scales[1][groups]
            update_(values, wide, coded, numbers)
            at += values.numel()

    def in_c(self, given: Sequence[ParameterUpdate]) -> InC:
        """One call of the function for several parameters, whose scales are checked."""
        for each in given:
            _check_scales(each)
        return super().in_c(given)

    def fault(self) -> str | None:
        """As `native_reason`."""
        return native_reason()

    def by_torch(
        self, values: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, Any], step: int, options: AdamWOptions
    ) -> None:
        """By the operations of `codes.update_`."""
        update_(values, gradient, coded_state(state), scalars_of(step, options, 1.0))


@functools.cache
def native_reason() -> str | None:
    """Returns why AdamW8bit isn't updated by one pass in C on this machine, or None if it is."""
    return AdamW8bitInOnePass().found_fault()


AdamW8bit.__module__ = "megatrain"  # which checkpoints name: the class may move
_STEP = step_code(AdamW8bit)
_EXACT, _CODED = f"{torch.optim.AdamW.__module__}.AdamW", "megatrain.AdamW8bit"
conversions += (
    Conversion(_EXACT, _CODED, "exp_avg", "its moments are rounded to 8 bits", dict),  # by `load_state_dict`
    Conversion(_CODED, _EXACT, "exp_avg_codes", "its moments are decoded to fp32", exact_state),
)


def _check_scales(given: ParameterUpdate) -> None:
    """Refuses scales of another dtype or number than the parameter's groups: the kernel would read other memory.

    Raises:
        OptimizerError: With both.
    """
    groups = -(-given.gradient.numel() // GROUP)
    for (name, dtype), scales in zip(SCALES.items(), given.numbers[1:], strict=True):
        if (scales.dtype, tuple(scales.shape)) != (dtype, (groups,)) or not scales.is_contiguous():
            raise OptimizerError(
                f"`{name}` of a {tuple(given.gradient.shape)} parameter is {scales.dtype}, {tuple(scales.shape)}.\n"
                f"  AdamW8bit has one scale for {GROUP} elements: {dtype}, {(groups,)}.\n"
                "  Load the optimizer's state by its load_state_dict, or clear the parameter's state to begin anew."
            )
