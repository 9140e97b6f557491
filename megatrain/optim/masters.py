"""The step of a torch optimizer over parameters that are bf16, whose masters hold more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from megatrain.errors import OptimizerError
from megatrain.optim.adamw import AdamWOptions, Kernel, Moments, adamw_
from megatrain.optim.split import Master, read_, write_
from megatrain.optim.whole_step import Optimizer, StepCode, step_code

GradientOf = Callable[[torch.Tensor], torch.Tensor | None]


class MasterStep:
    """Updates the masters of the parameters in an optimizer's groups: `code` of a `BlockOptimizer`.

    AdamW runs as one fused pass over each master, and has the bits of `fused=True` over fp32 parameters. For any other
    optimizer the masters of one call are joined to fp32, its own code updates them, and they are split again: that
    takes four bytes per element of a block, and has the bits of that code over fp32 parameters. State is fp32 either
    way, and lies in `optimizer.state`.

    Note that torch's `load_state_dict` turns state into the dtype of its parameter: load fp32 moments otherwise.

    Attributes:
        scale: Factor of every gradient, such as the coefficient of clipping; set it before the updates of a step.

    Args:
        masters: By parameter; a parameter's data is the bf16 tensor `high` of its master. Parameters that have none
            (norms kept in fp32) are updated by the optimizer's own code, on their own memory.
        gradient_of: Returns a parameter's gradient, of its shape; None is `.grad`. Gradients of parameters without a
            master are scaled in place, as `clip_grad_norm_` does.
        kernel: Of AdamW; see `adamw_`.
        threads: Of AdamW's native kernel.
    """

    def __init__(
        self,
        masters: Mapping[torch.Tensor, Master],
        *,
        gradient_of: GradientOf | None = None,
        kernel: Kernel = "auto",
        threads: int | None = None,
    ):
        self.scale = 1.0
        self._masters = masters
        self._gradient_of: GradientOf = gradient_of or _grad
        self._kernel: Kernel = kernel
        self._threads = threads

    def __call__(self, optimizer: Optimizer) -> None:
        """Updates all parameters in the optimizer's groups that have a gradient."""
        fused: list[torch.Tensor] = []
        if step_code(optimizer) is _ADAMW:
            for group in optimizer.param_groups:
                if _is_fusable(group):
                    options = AdamWOptions.of(group)
                    for parameter, master in self._mastered(group):
                        self._adamw(parameter, master, optimizer.state[parameter], options)
                        fused.append(parameter)
        _without(optimizer, fused, self._by_its_own_code)

    def _mastered(self, group: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, Master]]:
        for parameter in group["params"]:
            if parameter in self._masters and self._gradient_of(parameter) is not None:
                yield parameter, self._masters[parameter]

    def _adamw(self, parameter: torch.Tensor, master: Master, state: dict[str, Any], options: AdamWOptions) -> None:
        if not state:
            zeros = Moments.zeros(master)
            state.update(step=torch.tensor(0.0), exp_avg=zeros.exp_avg, exp_avg_sq=zeros.exp_avg_sq)
        moments = Moments(state["exp_avg"], state["exp_avg_sq"])
        if moments.exp_avg.dtype != torch.float32:
            raise OptimizerError(
                f"the moments of a {tuple(parameter.shape)} parameter are {moments.exp_avg.dtype}.\n"
                "  Over bf16 masters they stay fp32; load_state_dict turns state into the parameter's dtype.\n"
                "  Put the fp32 tensors into optimizer.state after loading."
            )
        gradient = self._gradient_of(parameter)
        assert gradient is not None
        state["step"] += 1
        adamw_(
            master,
            moments,
            gradient,
            step=int(state["step"].item()),
            options=options,
            scale=self.scale,
            kernel=self._kernel,
            threads=self._threads,
        )

    def _by_its_own_code(self, optimizer: Optimizer) -> None:
        taken: list[tuple[torch.Tensor, Master, torch.Tensor | None]] = []
        try:
            for group in optimizer.param_groups:
                for parameter, master in self._mastered(group):
                    taken.append((parameter, master, parameter.grad))
                    self._widen(parameter, master)
                for parameter in (p for p in group["params"] if p not in self._masters and p.grad is not None):
                    if self.scale != 1.0:
                        parameter.grad.mul_(self.scale)
            step_code(optimizer)(optimizer)
            for parameter, master, _ in taken:
                write_(master, parameter.detach())
        finally:
            for parameter, master, gradient in taken:
                parameter.grad = None
                parameter.data = master.high
                parameter.grad = gradient

    def _widen(self, parameter: torch.Tensor, master: Master) -> None:
        """Lets a parameter be fp32, with an fp32 gradient, for the time of the optimizer's own code."""
        gradient = self._gradient_of(parameter)
        assert gradient is not None
        parameter.grad = None
        parameter.data = read_(torch.empty(master.high.shape), master)
        wide = gradient.float()
        parameter.grad = wide if self.scale == 1.0 and wide is not gradient else wide * self.scale


def _grad(parameter: torch.Tensor) -> torch.Tensor | None:
    return parameter.grad


_ADAMW = step_code(torch.optim.AdamW([torch.nn.Parameter(torch.empty(0))]))


def _is_fusable(group: Mapping[str, Any]) -> bool:
    """Whether the fused update does what `AdamW.step` would do with these options."""
    others = ("amsgrad", "capturable", "differentiable")
    return bool(group["decoupled_weight_decay"]) and not any(group[option] for option in others)


def _without(optimizer: Optimizer, done: list[torch.Tensor], code: StepCode) -> None:
    """Runs code on the optimizer without the parameters that are done; all else in the groups stays theirs."""
    left = set(done)
    groups = optimizer.param_groups
    kept = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [p for p in group["params"] if p not in left]
        if any(group["params"] for group in groups) or not done:
            code(optimizer)
    finally:
        for group, params in zip(groups, kept, strict=True):
            group["params"] = params
