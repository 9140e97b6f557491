"""Hooks on gradients run in the order of eager's backward: in training steps and in loops of calls and backwards."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import nn
from torch.autograd.graph import get_gradient_edge

import megatrain
from megatrain.errors import ExecuteError, HookOrderWarning
from tests.comparing import assert_same
from tests.draws import draws

WIDTH = 8


class Drawn(nn.Module):
    """A model of pieces that are drawn: tied weights, several uses, frozen parameters, dropout, its own Functions."""

    def __init__(self, draw: random.Random):
        super().__init__()
        self.pieces = [draw.choice(PIECES) for _ in range(draw.randint(3, 6))]
        self.first = nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.5)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.7) for _ in self.pieces)
        self.scales = nn.ParameterList(torch.rand(WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(0.25 if draw.random() < 0.5 else 0.0)
        for parameter in self.parameters():
            parameter.requires_grad_(draw.random() < 0.85)
        self.first.weight.requires_grad_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for piece, layer in zip(self.pieces, self.layers, strict=True):
            x = piece(self, layer, x)
        return x


def _plain(model: Drawn, layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer(x).relu()


def _normed(model: Drawn, layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x + model.dropout(layer(model.norm(x)))


def _tied(model: Drawn, layer: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(layer(x), model.first.weight.t(), layer.bias)


def _scaled(model: Drawn, layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(model.scales[0] * x, model.scales[1], layer(x))


def _in_place(model: Drawn, layer: Any, x: torch.Tensor) -> torch.Tensor:
    y = layer(x) * 1
    y[:, :4] += model.scales[2][:4]
    return y.mul_(model.scales[0])


def _unread(model: Drawn, layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x.tanh() * model.first.weight.detach()[0] + (model.scales[2] > 0.5)


def _own(model: Drawn, layer: Any, x: torch.Tensor) -> torch.Tensor:
    return Scale.apply(x, model.scales[2], layer.weight)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scale, weight)
        return (x * scale) @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        scale, weight = ctx.saved_tensors
        back = gradient @ weight.t()
        return back * scale, back.sum(0), gradient.sum(0).expand_as(weight)


PIECES = (_plain, _normed, _tied, _scaled, _in_place, _unread, _own)
Seen = list[tuple[str, torch.Tensor]]


def hooked(model: nn.Module, draw: random.Random) -> Seen:
    """Puts hooks on some parameters, which draw noise; returns what they note."""
    seen: Seen = []
    for name, parameter in model.named_parameters():
        kind = draw.choice(["none", "gradient", "gradient", "accumulated", "both"])
        if not parameter.requires_grad or kind == "none":
            continue

        def noisy(gradient: torch.Tensor, name: str = name) -> torch.Tensor:
            noise = torch.randn_like(gradient)
            seen.append((name, gradient + noise))
            return gradient + noise

        def note(parameter: torch.Tensor, name: str = name) -> None:
            assert parameter.grad is not None
            seen.append((f"{name} accumulated", parameter.grad + torch.rand(())))

        if kind != "accumulated":
            parameter.register_hook(noisy)
        if kind != "gradient":
            parameter.register_post_accumulate_grad_hook(note)
    return seen


MODES: dict[str, dict[str, Any]] = {
    "recompute": {"activations": "recompute"},
    "keep": {"activations": "keep"},
    "offload": {"activations": "offload"},
    "clipped": {"max_grad_norm": 0.1},
    "serial": {"overlap": False},
    "spread": {"spread": True},
}


def run(how: str, seed: int, mode: str) -> tuple[Seen, nn.Module, list[Any]]:
    """Trains a drawn model for three steps: with eager, in a loop of the compiled model, or in steps."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model: Any = Drawn(draw)
    seen = hooked(model, draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    options = dict(MODES[mode])
    activations = {"activations": options.pop("activations")} if "activations" in options else {}
    size = draw.choice([None, "512B"])
    call = model
    if how != "eager":
        call = megatrain.compile(model, device="cpu", transfer="copy", block_bytes=size, **activations)
    step = None
    if how == "step":
        step = megatrain.TrainStep(call, optimizer, loss=lambda r, b: r.square().sum(), **options)
    states: list[Any] = []
    for _ in range(2):
        x = torch.randn(3, WIDTH)
        if step is not None:
            step(x)
        else:
            call(x).square().sum().backward()
            if "max_grad_norm" in options:
                nn.utils.clip_grad_norm_(model.parameters(), options["max_grad_norm"])
            optimizer.step()
            optimizer.zero_grad()
        states.append(torch.get_rng_state())
    if step is not None:
        step.flush()
    return seen, model, states


@draws(16, usual=5)
@given(how=st.sampled_from(["loop", "step"]), seed=st.integers(100, 10**6), mode=st.sampled_from(list(MODES)))
def test_hooks_of_drawn_models_see_what_they_see_in_eager(how: str, seed: int, mode: str) -> None:
    """They draw."""
    check(how, seed, mode)


def check(how: str, seed: int, mode: str) -> None:
    eager, model, states = run("eager", seed, mode)
    seen, other, others = run(how, seed, mode)
    assert [name for name, _ in seen] == [name for name, _ in eager]
    assert_same(states, others, "generators")
    for (name, expected), (_, found) in zip(eager, seen, strict=True):
        # Of a parameter with several uses in one block and one in another the sum associates otherwise.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    for one, other_one in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(other_one, one, rtol=1e-5, atol=1e-5)


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


def test_hooks_that_come_after_the_call_have_eagers_order() -> None:
    found: list[list[str]] = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model, seen = opaque(), list[str]()
        y = (megatrain.compile(model, device="cpu", transfer="copy") if compiles else model)(torch.ones(2, WIDTH))
        for name, parameter in model.named_parameters():
            put_hook(name, parameter, seen)
        y.sum().backward()
        found.append(seen)
    assert found[0] == found[1]


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
