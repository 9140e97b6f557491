"""Real kernels of Triton, where it is installed. No device is needed, since none runs."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatrain.errors import TraceError
from megatrain.passes.exact_fakes import exact_fakes
from megatrain.tracer.trace import trace

triton: Any = pytest.importorskip("triton")
tl: Any = pytest.importorskip("triton.language")
compiler: Any = pytest.importorskip("triton.backends.compiler")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class NoDevice:
    """Stands for the driver of a card: code is compiled for one, and a launch fails."""

    def get_current_target(self) -> Any:
        return compiler.GPUTarget("cuda", 80, 32)

    def get_current_device(self) -> Any:
        raise AssertionError("a kernel was launched")

    def get_benchmarker(self) -> Any:
        return None


@pytest.fixture(autouse=True)
def _no_device() -> Generator[None]:
    with mock.patch.dict(vars(triton.runtime.driver)):
        triton.runtime.driver.set_active(NoDevice())
        yield


@triton.jit
def add(x_ptr, y_ptr, bias_ptr, count, HAS_BIAS: tl.constexpr = True):  # pyright: ignore[reportInvalidTypeForm]
    at = tl.arange(0, 16)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < count), mask=at < count)


def tuned(kernel: Any) -> Any:
    """A kernel with configurations; a tuner looks for the driver when it is made."""
    with mock.patch.dict(vars(triton.runtime.driver)):
        triton.runtime.driver.set_active(NoDevice())
        return triton.autotune([triton.Config({}, num_warps=2)], key=["count"])(kernel)


guessed = triton.heuristics({"HAS_BIAS": lambda given: given["bias_ptr"] is not None})(add)


@pytest.mark.parametrize("kernel", [add, tuned(add), guessed, tuned(guessed)])
def test_no_real_kernel_is_launched_without_values(kernel: Any):
    kept = torch.zeros(16)
    with exact_fakes() as mode:
        x = mode.from_tensor(torch.zeros(16))
        for given in (x, kept):
            with pytest.raises(RuntimeError, match="the Triton kernel `add` needs tensors with values"):
                kernel[(1,)](given, given, None, 16)
    with pytest.raises(AssertionError, match="a kernel was launched"):  # as before
        kernel[(1,)](kept, kept, None, 16)


class Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, how: str) -> torch.Tensor:
        y, given = torch.empty_like(x), x
        if how == "described":
            home: Any = pytest.importorskip("triton.tools.tensor_descriptor")
            given = home.TensorDescriptor.from_tensor(x, [4, 4])
        kernel = torch.library.wrap_triton(add) if how == "wrapped" else add
        kernel[(1,)](given, y, None, x.numel(), False)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


@pytest.mark.parametrize("how", ["plain", "wrapped", "described"])
def test_a_model_of_real_kernels_needs_values(how: str):
    class Adding(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return Added.apply(super().forward(input), how)  # pyright: ignore

    with torch.device("meta"):
        model = Adding(4, 4)
    with pytest.raises(TraceError, match="the Triton kernel `add` needs tensors with values"):
        trace(model, (torch.randn(4, 4),))
