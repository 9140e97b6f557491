"""Updates that are due are the same in whatever mode the code is that takes them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import megatrain
from tests.comparing import assert_same_bits
from tests.runtime.parity import seeded
from tests.tiers import one_in


class Refusing(TorchFunctionMode):
    """No function may get a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(arg, torch.Tensor) for arg in args):
            raise KeyError(func)
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "default device": lambda: torch.device("meta"),
    "fake tensors": FakeTensorMode,
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "function modes": lambda: nested(torch.device("meta"), Refusing(), torch.device("meta")),
}


@contextmanager
def nested(*modes: AbstractContextManager[object]) -> Generator[None]:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


OPTIMIZERS = {
    "one pass": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "own code": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
}


def start(make: Callable[..., torch.optim.Optimizer]) -> tuple[megatrain.TrainStep, nn.Module, torch.optim.Optimizer]:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = make(model.parameters())
    compiled = megatrain.compile(model, device="cpu")
    step = megatrain.TrainStep(compiled, optimizer, loss=lambda result, _: result.square().mean(), max_grad_norm=1.0)
    step(torch.ones(2, 4))
    return step, model, optimizer


def dropped(step: megatrain.TrainStep) -> None:
    step.user = {"step": step}  # a cycle: only the collector finds it


@pytest.mark.parametrize(("optimizer", "mode", "way"), one_in(3, product(OPTIMIZERS, MODES, ["flush", "collector"])))
def test_the_first_updates_are_taken_in_any_mode(mode: str, way: str, optimizer: str) -> None:
    expected, plain, _ = start(OPTIMIZERS[optimizer])
    expected.flush()
    step, model, used = start(OPTIMIZERS[optimizer])
    gc.disable()
    try:
        if way == "collector":
            dropped(step)
            del step
        with MODES[mode]():
            gc.collect() if way == "collector" else step.flush()
    finally:
        gc.enable()
    again = megatrain.TrainStep(megatrain.compile(model, device="cpu"), used, loss=lambda result, _: result.sum())
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter, plain.get_parameter(name), name)
    again(torch.ones(2, 4))  # what the updates made can be written to
    assert all(state["step"] == 2 for state in used.state.values())
