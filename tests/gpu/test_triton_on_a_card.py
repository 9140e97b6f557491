"""Kernels of Triton on a card: launched in steps, and never while a model is captured, measured or planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megatrain

triton: Any = pytest.importorskip("triton")
tl: Any = pytest.importorskip("triton.language")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton needs a card")


@triton.jit
def gate(x_ptr, y_ptr, count, IS_BACKWARD: tl.constexpr, BLOCK: tl.constexpr):  # pyright: ignore[reportInvalidTypeForm]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count)
    if IS_BACKWARD:
        x = x * tl.load(y_ptr + at, mask=at < count) * 2
    else:
        x = x * x
    tl.store(y_ptr + at, x, mask=at < count)


def launch(x: torch.Tensor, y: torch.Tensor, *, is_backward: bool) -> None:
    gate[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), IS_BACKWARD=is_backward, BLOCK=64)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.full_like(x, 3.0)
        launch(x, y, is_backward=False)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dx = grads[0].clone(memory_format=torch.contiguous_format)
        launch(ctx.saved_tensors[0], dx, is_backward=True)
        return dx


class Squaring(nn.Module):
    def __init__(self, *, has_function: bool) -> None:
        super().__init__()
        self.has_function = has_function
        self.one = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: Any = self.one(x)
        if self.has_function:
            return Squared.apply(y)  # pyright: ignore[reportReturnType]
        factor = torch.empty_like(y)
        launch(y.detach(), factor, is_backward=False)
        return y * factor


def made(*, has_function: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(Squaring(has_function=has_function), nn.Tanh()) for _ in range(4)))


@pytest.mark.parametrize("has_function", [True, False])
def test_models_with_kernels_have_the_bits_of_eager(*, has_function: bool):
    device = torch.accelerator.current_accelerator()
    assert device is not None
    model, eager = made(has_function=has_function), made(has_function=has_function).to(device)
    compiled = megatrain.compile(model, device=device, memory="64MiB")
    for _ in range(3):
        x = torch.randn(8, 32, device=device)
        expected, found = eager(x), compiled(x)
        expected.sum().backward()
        found.sum().backward()
        assert torch.equal(found, expected)
    assert ("opaque" in str(compiled.program)) != has_function
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad.cpu())
