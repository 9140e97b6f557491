"""kernels="graphs": no recording holds what Python decided in an earlier run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import megatrain
from megatrain.errors import EagerKernelsWarning, OptionError
from megatrain.extending import mark_recordable
from megatrain.runtime.replays import Replays
from tests.comparing import assert_same
from tests.equal_blocks import EqualBlocks
from tests.gpu.test_cuda_training import device

STEPS = 3
"""In each of which the environment says something else. Other sources: tests/simulated_runs/test_user_code_there.py."""


def from_environment() -> float:
    return float(os.environ["SCALE_OF_TEST"])


class InForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.scale = from_environment()
        return x * ctx.scale

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * ctx.scale


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        del ctx
        return gradients[0] * from_environment()


@mark_recordable
class Fixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        del ctx
        return gradients[0] * 3


class OfFixed(Fixed):
    """Of a class with the mark, but with a forward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x * from_environment()


@torch.library.custom_op("megatrain_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * from_environment()


@torch.library.custom_op("megatrain_tests::scaled_back", mutates_args=())
def scaled_back(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op(mark_recordable("megatrain_tests::doubled"), mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


for op in (scaled, scaled_back, doubled):
    op.register_fake(lambda x: torch.empty_like(x))
doubled.register_autograd(lambda ctx, gradient: gradient * 2)
scaled.register_autograd(lambda ctx, gradient: gradient * 2)
scaled_back.register_autograd(lambda ctx, gradient: gradient * from_environment())

LIBRARY = torch.library.Library("megatrain_tests_more", "FRAGMENT")
LIBRARY.define("scaled(Tensor x) -> Tensor")
LIBRARY.impl("scaled", lambda x: x * from_environment(), "CompositeImplicitAutograd")


class Calls(nn.Module):
    """Applies a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = [function]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function[0](x)


def hooked(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * from_environment())
    return y


WAYS: dict[str, Callable[..., Any]] = {
    "forward": lambda x: InForward.apply(x),
    "backward": lambda x: InBackward.apply(x),
    "subclass of a marked one": lambda x: OfFixed.apply(x),
    "custom op": lambda x: scaled(x),
    "custom op's backward": lambda x: scaled_back(x),
    "kernel of a library": lambda x: torch.ops.megatrain_tests_more.scaled(x),
    "hook on a tensor": hooked,
}


def batch(seed: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)).to(device())


def steps_of(model: nn.Module, mode: Callable[[], AbstractContextManager[Any]] = nullcontext) -> list[Any]:
    """Losses and gradients of steps, in each of which Python decides otherwise."""
    found: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        os.environ["SCALE_OF_TEST"] = str(1 + 0.5 * step)
        optimizer.zero_grad()
        with mode():
            loss = model(batch(step)).square().mean()
            loss.backward()
        found.append([loss.detach().cpu(), *(p.grad.cpu().clone() for p in model.parameters() if p.grad is not None)])
        optimizer.step()
    return found


def assert_eagers(extra: Callable[[], nn.Module]) -> None:
    wanted = EqualBlocks(3, extra=extra()).to(device())
    compiled = megatrain.compile(EqualBlocks(3, extra=extra()), device=device(), kernels="graphs")
    assert_same(steps_of(wanted), steps_of(compiled))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALE_OF_TEST", "1")


def test_a_function_that_is_not_recorded_is_named():
    with pytest.warns(EagerKernelsWarning, match="autograd.Function tests.gpu.* would repeat what its Python decided"):
        assert_eagers(lambda: Calls(WAYS["backward"]))


@pytest.mark.filterwarnings("ignore::megatrain.errors.EagerKernelsWarning")
@pytest.mark.parametrize("way", WAYS)
def test_each_way_by_which_python_runs_in_a_block_runs_in_each_step(way: str):
    assert_eagers(lambda: Calls(WAYS[way]))


class FunctionMode(TorchFunctionMode):
    """Scales what `gelu` returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * from_environment() if func is F.gelu else result


class DispatchMode(TorchDispatchMode):
    """Likewise."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * from_environment() if func is torch.ops.aten.gelu.default else result


@contextmanager
def replaced_kernel() -> Generator[None]:
    """Another kernel of torch's own operator, in Python."""
    library = torch.library.Library("aten", "IMPL")

    def kernel(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
        del approximate
        return torch.relu(x) * from_environment()

    library.impl("gelu", kernel, "PrivateUse1" if device().type == "sim" else device().type.upper())
    yield


# A capture can't be made under the first two: the model is compiled, and has run, before.
@pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")
@pytest.mark.parametrize("mode", [FunctionMode, DispatchMode, replaced_kernel])
def test_modes_and_kernels_in_python_of_the_caller_run_in_each_step(mode: Callable[[], AbstractContextManager[Any]]):
    found: list[Any] = []
    for kernels in ("eager", "graphs"):
        model = EqualBlocks()
        compiled = megatrain.compile(model, device=device(), kernels=kernels, activations="recompute")
        found.append([*steps_of(compiled)])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found[-1] += [*steps_of(compiled, mode), *steps_of(compiled)]
        assert any(issubclass(w.category, EagerKernelsWarning) for w in told) == (
            mode is replaced_kernel and kernels == "graphs"
        )
    assert_same(found[0], found[1])
    if mode is not FunctionMode:  # which torch leaves for the body of `backward`, and so for what is recomputed there
        plain: Any = EqualBlocks().to(device())
        assert_same([*steps_of(plain), *steps_of(plain, mode)], found[1][: 2 * STEPS])


def test_functions_and_operators_that_are_marked_are_recorded(monkeypatch: pytest.MonkeyPatch):
    made: list[str] = []
    recorded = Replays._recorded
    monkeypatch.setattr(Replays, "_recorded", lambda self, *given: made.append(self._name) or recorded(self, *given))
    with warnings.catch_warnings():
        warnings.simplefilter("error", EagerKernelsWarning)
        assert_eagers(lambda: Calls(lambda x: torch.ops.megatrain_tests.doubled(Fixed.apply(x))))
    assert made


def test_a_mark_is_for_functions_and_operators_alone():
    for wrong in (nn.Linear, lambda x: x, "scaled", torch.ops.megatrain_tests.scaled):
        with pytest.raises(
            OptionError, match=r"function.*(?s:.)*a class of torch.autograd.Function, or the name of an operator"
        ):
            mark_recordable(wrong)  # pyright: ignore
