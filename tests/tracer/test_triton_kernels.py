"""Real kernels of Triton, where it is installed: torch says what they write. No device is needed, since none runs."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import megatrain
from megatrain.torch_private import FakeTensorMode
from megatrain.tracer.capture.torch_triton import kernel_name, tensors_in_launch, tensors_written
from megatrain.tracer.recording.opaque import Opaque
from megatrain.tracer.trace import trace
from tests.stand_in_triton import names_written

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
def add(x_ptr, y_ptr, bias_ptr, count, scale=1, HAS_BIAS: tl.constexpr = True):  # pyright: ignore[reportInvalidTypeForm]
    at = tl.arange(0, 16)
    value = tl.load(x_ptr + at, mask=at < count) * scale
    if HAS_BIAS:
        value += tl.load(bias_ptr + at, mask=at < count)
        tl.atomic_add(bias_ptr, 1.0)
    tl.store(y_ptr + at, value, mask=at < count)


@triton.jit
def through(ptr, value):
    tl.store(ptr, value)


@triton.jit
def nested(first, count, x_ptr, y_ptr):
    through(y_ptr, tl.load(x_ptr))


@triton.jit
def assembled(x_ptr, y_ptr):
    value = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tl.load(x_ptr)], tl.float32, is_pure=False, pack=1)
    tl.store(y_ptr, value)


@triton.jit
def by_address(address, value):
    tl.store(address.to(tl.pointer_type(tl.float32)), value)


def tuned_with(kernel: Any, *configs: Any, **options: Any) -> Any:
    """A kernel with configurations; a tuner looks for the driver when it is made."""
    with mock.patch.dict(vars(triton.runtime.driver)):
        triton.runtime.driver.set_active(NoDevice())
        return triton.autotune(list(configs), key=["count"], **options)(kernel)


without_bias = triton.Config({"HAS_BIAS": False})
given_bias = triton.heuristics({"HAS_BIAS": lambda given: given["bias_ptr"] is not None})(add)
tuned = tuned_with(add, without_bias, triton.Config({"HAS_BIAS": False}, num_warps=8))
reset = tuned_with(add, without_bias, reset_to_zero=["x_ptr"])
hooked = tuned_with(add, triton.Config({"HAS_BIAS": False}, pre_hook=lambda given: None))
tuned_over_heuristics = tuned_with(given_bias, triton.Config({}, num_warps=2))


@pytest.mark.parametrize(
    ("kernel", "args", "kwargs", "written"),
    [
        (add, ("x", "y", "b", 1), {}, "yb"),
        (add, ("x", "y", "b", 1, 1, False), {}, "y"),
        (add, ("x", "y", None, 5), {"HAS_BIAS": False, "num_warps": 8}, "y"),
        (add, (), {"HAS_BIAS": True, "count": 3, "bias_ptr": "b", "y_ptr": "y", "x_ptr": "x", "scale": 2.5}, "yb"),
        (nested, (None, 1, "x", "y"), {}, "y"),
        (nested, (True, 1 << 40, "x", "y"), {}, "y"),
        (given_bias, ("x", "y", None, 5), {}, "y"),
        (given_bias, ("x", "y", "b", 5), {}, "yb"),
        (tuned, ("x", "y", "b", 5), {}, "y"),
        (reset, ("x", "y", "b", 5), {}, "xy"),
        (hooked, ("x", "y", "b", 5), {}, None),
        (tuned_over_heuristics, ("x", "y", None, 5), {}, "y"),
        (add, ("x", "y"), {}, None),
        (add, ("x", "y", ("b", "b"), 5), {}, None),
        (assembled, ("x", "y"), {}, None),
    ],
)
@pytest.mark.parametrize("is_fake", [True, False])
def test_what_a_real_kernel_writes_is_found(kernel: Any, args: Any, kwargs: Any, written: str | None, *, is_fake: bool):
    mode = FakeTensorMode()
    tensors = {name: mode.from_tensor(t) if is_fake else t for name, t in zip("xyb", torch.zeros(3, 16), strict=True)}
    assert names_written(kernel, args, kwargs, tensors) == written


def test_a_kernel_that_writes_by_an_address_writes_no_tensor():
    assert not tensors_written(by_address, (1 << 40, 1.0), {})


def test_what_torch_cannot_read_is_not_logged(caplog: pytest.LogCaptureFixture):
    assert tensors_written(assembled, (torch.zeros(2, dtype=torch.float64), torch.zeros(2)), {}) is None
    assert not caplog.records


def test_a_tensor_that_a_descriptor_describes_is_found():
    descriptors: Any = pytest.importorskip("triton.tools.tensor_descriptor")
    x, y = torch.zeros(16, 16), torch.zeros(16)
    described = descriptors.TensorDescriptor.from_tensor(x, [16, 16])
    assert tensors_in_launch((described, y))[0] is x
    assert tensors_written(nested, (None, 1, y, described), {}) is None


def test_kernels_have_the_names_of_their_functions():
    names = [kernel_name(kernel) for kernel in (add, tuned, given_bias, tuned_over_heuristics)]
    assert names == ["add"] * 4


class Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        add[(1,)](x, y, labels, x.numel(), HAS_BIAS=False)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dx = torch.empty_like(grads[0])
        tuned[(1,)](grads[0].contiguous(), dx, None, dx.numel())
        return dx, None


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Added.apply(layer(x), labels)  # pyright: ignore
        return x * (2 if labels.sum() > 1 else 1)


def test_a_model_of_real_kernels_is_planned_without_a_launch():
    with torch.device("meta"):
        model = Adding()
    inputs = torch.randn(2, 4), torch.ones(4)
    assert "Added" in str(trace(model, inputs))
    program = megatrain.lower(megatrain.trace(model, inputs))
    assert {template.cost.unmeasured for template in program.templates.values()} == {""}


def test_an_op_of_kernels_is_a_node():
    @torch.library.triton_op("real_triton::doubled", mutates_args={})  # pyright: ignore[reportUntypedFunctionDecorator]
    def doubled(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        torch.library.wrap_triton(add)[(1,)](x, y, x, x.numel(), 2, False)
        return y

    class Doubling(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return doubled(super().forward(input)).sin()

    traced = trace(Doubling(4, 4), (torch.randn(2, 4),))
    assert "real_triton::doubled(linear)" in str(traced)


def test_a_wrapped_kernel_outside_of_an_op_makes_its_module_opaque():
    class Wrapping(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            x = super().forward(input)
            y = torch.empty_like(x)
            torch.library.wrap_triton(add)[(1,)](x, y, x, x.numel(), 2, False)
            return y.sin()

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Wrapping(4, 4), nn.Linear(4, 4))
    traced = trace(model, (torch.randn(2, 4),))
    (reason,) = [node.target.reason for node in traced.graph.nodes if isinstance(node.target, Opaque)]
    assert reason.startswith("launches the Triton kernel `add` at test_triton_kernels.py")
