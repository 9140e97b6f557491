"""A stand-in for the package Triton, whose kernels are Python functions, and models that launch kernels."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.base.torch_private import FakeTensor
from tests.comparing import assert_same

_NAME = "triton.runtime.jit"
# As Triton's own: `run` is looked up at the launch. Its line is no user's: its module is Triton's.
_LAUNCHER = eval("lambda self, grid: lambda *given: self.run(*given, grid=grid, warmup=False)", {"__name__": _NAME})


class KernelInterface:
    """What is launched as `kernel[grid](...)`."""

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return _LAUNCHER(self, grid)


class JITFunction(KernelInterface):
    """A kernel that does `fn` on real tensors; on others, a real one would use an address that isn't theirs."""

    def __init__(self, fn: Callable[..., None]) -> None:
        self.fn, self.__name__ = fn, fn.__name__
        self.launched: list[Any] = []

    def run(self, *args: Any, grid: Any, warmup: bool) -> None:
        assert not any(isinstance(value, FakeTensor) or getattr(value, "is_meta", False) for value in args)
        self.launched.append(grid)
        with torch._C._DisableTorchDispatch(), torch.no_grad():  # no mode sees what a kernel does
            self.fn(*(x.detach() if isinstance(x, torch.Tensor) else x for x in args))


class Autotuner(KernelInterface):
    """A wrapper without a name, which launches the kernel in it."""

    def __init__(self, fn: JITFunction) -> None:
        self.fn = fn

    def run(self, *args: Any, **kwargs: Any) -> None:
        self.fn.run(*args, **kwargs)


def stand_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the package where megatrain looks for it."""
    module = ModuleType(_NAME)
    vars(module).update(KernelInterface=KernelInterface)
    monkeypatch.setitem(sys.modules, _NAME, module)


class Scaled(torch.autograd.Function):
    """A product whose forward and backward are kernels; `launch` makes the last of three tensors of the others."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, launch: Callable[..., Any]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.launch = launch
        launch(x, weight, made := torch.empty_like(x))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.launch(grads[0].contiguous(), weight, made := torch.empty_like(x))
        return made, (grads[0] * x).sum(0), None


class Scaling(nn.Module):
    """Launches in a Function; or between torch functions, where a capture has no call for it."""

    def __init__(self, launch: Callable[..., Any], width: int = 3, *, has_function: bool = True) -> None:
        super().__init__()
        self.launch, self.has_function = launch, has_function
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> Any:
        if self.has_function:
            return Scaled.apply(x, self.weight, self.launch)
        self.launch(x.detach(), self.weight, made := torch.empty_like(x))
        return x * self.weight + made


def in_layers(width: int, made: Callable[[], nn.Module]) -> nn.Module:
    """Three blocks with what is `made` in each."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), made(), nn.Tanh()) for _ in range(3)))


def assert_bits_of_eager(model: nn.Module, x: torch.Tensor, device: Any = "cpu", **options: Any) -> Any:
    """Compares outputs, gradients and what is left of the input with eager's; returns the compiled module."""
    eager = copy.deepcopy(model).to(device)
    compiled = megatrain.compile(model, device=device, **options)
    one, other = x.to(device, copy=True), x.to(device, copy=True)
    for _ in range(3):
        expected, found = eager(one), compiled(other)
        (expected + found).sum().backward()
        assert_same(expected.detach(), found.detach(), "outputs")
        assert_same(one, other, "inputs")
    gradients = [[p.grad.cpu() for p in each.parameters() if p.grad is not None] for each in (eager, model)]
    assert_same(gradients[0], gradients[1], "gradients")
    return compiled
