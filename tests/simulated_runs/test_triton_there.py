"""Kernels of Triton on an accelerator, whose backward autograd runs on a thread of its own."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.passes.exact_fakes import exact_fakes
from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import DEVICE
from tests.stand_in_triton import JITFunction, stand_in_triton

threads = set[int]()


def scale(x: torch.Tensor, y: torch.Tensor, FACTOR: float) -> None:
    threads.add(threading.get_ident())
    y.copy_(x * FACTOR)


scaling, unread = JITFunction(scale, ["y"]), JITFunction(scale, None)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backward_kernel: Any) -> torch.Tensor:
        y = torch.empty_like(x)
        scaling[(1,)](x, y, FACTOR=3.0)
        ctx.kernel = backward_kernel
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dx = torch.empty_like(grads[0])
        ctx.kernel[(1,)](grads[0], dx, FACTOR=3.0)
        return dx, None


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Scaled.apply(layer(x), scaling).sin()  # pyright: ignore
        return x


def made() -> nn.Module:
    torch.manual_seed(0)
    return Scaling()


def test_a_backward_without_values_launches_nothing(sim: Simulator):
    with stand_in_triton(), exact_fakes():
        x = torch.ones(2, device=DEVICE).requires_grad_()
        result: Any = Scaled.apply(x, scaling)
        assert torch.autograd.grad(result.sum(), [x])[0].shape == (2,)
        result = Scaled.apply(x, unread)
        with pytest.raises(RuntimeError, match="the Triton kernel `scale` needs tensors with values"):
            torch.autograd.grad(result.sum(), [x])


def test_a_model_with_kernels_trains_as_in_eager(sim: Simulator):
    sim.order("late")
    model, eager = made(), made().to(DEVICE)
    x = torch.randn(2, 3, device=DEVICE)
    threads.clear()
    with stand_in_triton():
        compiled = megatrain.compile(model, device=DEVICE)
        for _ in range(2):
            expected, found = eager(x), compiled(x)
            expected.sum().backward()
            found.sum().backward()
            assert torch.equal(found, expected)
    assert {template.cost.unmeasured for template in compiled.program.templates.values()} == {""}  # pyright: ignore
    assert len(threads) > 1, "an eager backward launches from a thread of autograd's"
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad.cpu())
