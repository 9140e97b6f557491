"""Triton kernels are never launched on tensors without values; a module of the same form stands for Triton."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.torch_private import FakeTensor, FakeTensorMode
from megatrain.tracer.capture.triton_kernels import launches_on_values


class KernelInterface:
    """As Triton's: `kernel[grid](...)` runs it."""

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, **kwargs)

    def run(self, *args: Any) -> None:
        raise NotImplementedError


class Kernel(KernelInterface):
    """Writes its last argument by a function of the others, past torch, as a kernel does."""

    def __init__(self, fn: Callable[..., torch.Tensor]) -> None:
        self.fn, self.__name__ = fn, "scaled"

    def run(self, *args: torch.Tensor) -> None:
        assert not any(isinstance(each, FakeTensor) for each in args), "a kernel would read address 0"
        *inputs, out = args
        out.detach().numpy()[...] = self.fn(*(each.detach() for each in inputs)).numpy()


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("triton.runtime.jit")
    vars(module)["KernelInterface"] = KernelInterface
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", module)


scaled = Kernel(lambda x, weight: x * weight)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        ctx.save_for_backward(x, weight)
        made = torch.empty_like(x)
        scaled[(1,)](x, weight, made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # pyright: ignore
        x, weight = ctx.saved_tensors
        made = torch.empty_like(x)
        scaled[(1,)](gradient.contiguous(), weight, made)
        return made, (gradient * x).sum(0)


class Scale(nn.Module):
    """Its kernel is launched in a Function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x, self.weight)  # pyright: ignore


class Shift(nn.Module):
    """Its kernel is launched in the forward, on what needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(x)
        scaled[(1,)](x.detach(), self.weight, made)
        return x + made


def model(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), kind(), nn.Tanh()) for _ in range(3)))


@pytest.mark.parametrize(("kind", "said"), [(Scale, "Scaled.apply("), (Shift, "opaque")])
def test_kernels_in_a_function_are_captured_and_modules_with_others_run_their_own_code(
    kind: type[nn.Module], said: str
):
    """A Function is captured on the values of weights. All has eager's bits."""
    ours, eager = model(kind), model(kind)
    compiled = megatrain.compile(ours, device="cpu", memory="64KiB", transfer="copy")
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        found, expected = compiled(x), eager(x)
        found.sum().backward()
        expected.sum().backward()
        assert torch.equal(found, expected)
    for one, other in zip(ours.parameters(), eager.parameters(), strict=True):
        assert one.grad is not None
        assert torch.equal(one.grad, other.grad)  # pyright: ignore
    assert said in str(compiled.program)
    assert len(compiled.program.blocks) == 3


def test_a_kernel_needs_values():
    real, out = torch.ones(8), torch.empty(8)
    with FakeTensorMode() as mode, launches_on_values():
        with pytest.raises(RuntimeError, match="the Triton kernel `scaled` needs tensors with values"):
            scaled[(1,)](mode.from_tensor(real), real, out)
    with launches_on_values():
        scaled[(1,)](real, real * 2, out)
    assert torch.equal(out, real * 2)


def test_a_launcher_that_is_kept_is_the_kernels_own_afterwards():
    real, out, meta = torch.ones(8), torch.empty(8), torch.empty(8, device="meta")
    with FakeTensorMode() as mode, launches_on_values():
        kept, fake = scaled[(1,)], mode.from_tensor(real)
        with pytest.raises(RuntimeError, match="needs tensors with values"):
            kept(fake, fake, fake)
        with pytest.raises(RuntimeError, match="needs tensors with values"):
            kept(meta, real, out)
    kept(real, real * 3, out)
    assert torch.equal(out, real * 3)
    with pytest.raises(AssertionError, match="address 0"):
        kept(fake, fake, fake)  # nobody looks any more
