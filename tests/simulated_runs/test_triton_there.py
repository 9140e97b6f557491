"""Triton kernels on an accelerator, whose backward autograd runs on a thread of its own."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from megatrain.passes.exact_fakes import exact_fakes
from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import DEVICE
from tests.tracer.test_triton_kernels import KernelInterface, scaled


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        made = torch.empty_like(gradient)
        scaled[(1,)](gradient, gradient, made)
        return made


def test_a_backward_launches_nothing_on_tensors_without_values(sim: Simulator, monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("triton.runtime.jit")
    vars(module)["KernelInterface"] = KernelInterface
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", module)
    with exact_fakes():
        x = torch.ones(2, device=DEVICE).requires_grad_()
        result: Any = InBackward.apply(x)
        with pytest.raises(RuntimeError, match="the Triton kernel `scaled` needs tensors with values"):
            torch.autograd.grad(result.sum(), [x])
