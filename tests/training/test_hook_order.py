"""Hooks on gradients run in the order of eager's backward: in training steps and in loops of calls and backwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import megatrain
from megatrain.errors import ExecuteError, HookOrderWarning
from tests.comparing import assert_same

WIDTH = 8


def of_names(how: str, build: Callable[[], nn.Module], put: Callable[[str, nn.Parameter, list[str]], Any]) -> list[str]:
    """Runs a forward and a backward; returns the names of parameters in the order in which their hooks ran."""
    torch.manual_seed(0)
    model, seen = build(), list[str]()
    kept = [put(name, parameter, seen) for name, parameter in model.named_parameters()]
    call: Any = model if how == "eager" else megatrain.compile(model, device="cpu", transfer="copy")
    x = torch.randn(2, 3, WIDTH)
    if how == "step":
        megatrain.TrainStep(call, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda r, b: r.sum())(x)
    else:
        call(x).sum().backward()
    assert kept
    return seen


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


class Opaque(nn.Sequential):
    """Runs its own code at each step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.tolist()
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x) * self.calls


def opaque() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Opaque(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))))


def put_hook(name: str, parameter: nn.Parameter, seen: list[str]) -> Any:
    return parameter.register_hook(lambda _: seen.append(name))


def put_on_accumulator(name: str, parameter: nn.Parameter, seen: list[str]) -> Any:
    node = get_gradient_edge(parameter).node
    node.register_hook(lambda *_: seen.append(name if parameter.grad is not None else "none"))
    return node


def test_hooks_in_a_module_that_runs_its_own_code_have_eagers_order() -> None:
    assert of_names("step", opaque, put_hook) == of_names("eager", opaque, put_hook)


def test_hooks_whose_order_autograd_leaves_open_are_named() -> None:
    expected = of_names("eager", Recurrent, put_hook)
    with pytest.warns(HookOrderWarning, match=r"^hooks on the gradients of `lstm.weight_ih_l1`, .*another order"):
        assert of_names("step", Recurrent, put_hook) == expected


def test_hooks_on_accumulators_have_eagers_order_in_a_loop() -> None:
    assert of_names("loop", opaque, put_on_accumulator) == of_names("eager", opaque, put_on_accumulator)


def test_hooks_on_accumulators_are_refused_in_a_step() -> None:
    with pytest.raises(
        ExecuteError, match=r"^a hook on the accumulation of the gradient of `0.weight` would never run"
    ):
        of_names("step", opaque, put_on_accumulator)


def test_hooks_of_several_micro_batches_run_once_in_eagers_order_and_may_not_draw() -> None:
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        put_hook(name, parameter, seen)
    compiled = megatrain.compile(model, device="cpu", transfer="copy")
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda r, b: r.sum())
    batches, before = [torch.ones(2, WIDTH), torch.zeros(2, WIDTH)], copy.deepcopy(model.state_dict())
    model[1].weight.register_hook(lambda gradient: gradient + torch.rand(()))
    with pytest.raises(
        ExecuteError, match=r"hook on the gradient of `1.weight` draws random numbers, in a step of several"
    ):
        step(batches)
    step.flush()
    assert_same(before, model.state_dict())
    model[1].weight._backward_hooks.clear()
    seen.clear()
    step(batches)
    assert seen == ["2.bias", "2.weight", "1.bias", "0.bias", "0.weight"]
