"""Memory of weights that somebody else holds, and state that an autograd.Function keeps: as in eager."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import megatrain
from megatrain.base.sizes import parse_bytes
from megatrain.errors import ExecuteError, ScheduleError
from megatrain.optim.masters.halves import read_
from tests.comparing import assert_same
from tests.runtime.parity import PATHS

Held = dict[str, Any]


def build() -> Any:
    """Tied, frozen, and with buffers that the forward writes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = nn.Sequential(
            nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 6)
        )
    model[5].weight = model[2].weight
    model[4].requires_grad_(False)
    return model


def batch(step: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 24).view(4, 6) * (step + 1)


def state_of(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def exchange(tensors: Sequence[torch.Tensor], others: list[torch.Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        tensor.data, others[index] = others[index], tensor.data


def evaluate(call: Callable[..., Any], held: Held) -> None:
    with torch.no_grad():
        held["result"] = call(batch(7))


def swap_by_pointer(call: Any, model: nn.Module, optimizer: Any, held: Held) -> None:
    others = held.setdefault("others", [t.detach().clone() * 0 for t in state_of(model)])
    exchange(state_of(model), others)
    evaluate(call, held)
    exchange(state_of(model), others)


def swap_tensors(call: Any, model: nn.Module, optimizer: Any, held: Held) -> None:
    parameters = list(model.parameters())
    others = held.setdefault("swapped", [nn.Parameter(p.detach() * 0, p.requires_grad) for p in parameters])
    for _ in range(2):
        for pair in zip(parameters, others, strict=True):
            torch.utils.swap_tensors(*pair)
        evaluate(call, held)


def exchange_two(call: Any, model: Any, optimizer: Any, held: Held) -> None:
    model[0].weight.data, model[2].weight.data = model[2].weight.data, model[0].weight.data


@pytest.mark.parametrize("how", ["swap_tensors", "two parameters", "both are trained"])
def test_masters_keep_their_low_halves_while_their_memory_is_put_aside(how: str) -> None:
    def values(*, swaps: bool) -> tuple[list[torch.Tensor], int]:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
        for index, p in enumerate(model.parameters()):
            nn.init.constant_(p, 0.123 + index / 7)
        compiled = megatrain.compile(model, device="cpu", precision="bf16", transfer="copy")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = megatrain.TrainStep(compiled, optimizer, loss=lambda result, _: result.square().mean())
        parameters, held = list(model.parameters()), Held()
        for number in range(3):
            step(batch(number))
            if not swaps:
                continue
            if how == "two parameters":
                for _ in range(2):
                    exchange_two(compiled, model, optimizer, held)
                    if number == 1:
                        evaluate(compiled, held)
            else:
                (swap_tensors if how == "swap_tensors" else swap_by_pointer)(compiled, model, optimizer, held)
        step.flush()
        if swaps and how == "both are trained":
            with torch.no_grad():
                held["others"][0].add_(1)
            exchange(parameters, held["others"])
            assert torch.equal(read_(torch.empty(6, 6), compiled.masters[parameters[0]]), torch.ones(6, 6))
            exchange(parameters, held["others"])
        return [read_(torch.empty(p.shape), compiled.masters[p]) for p in parameters], compiled.masters.held_bytes

    (expected, nbytes), (found, others) = values(swaps=False), values(swaps=True)
    assert_same(expected, found)
    assert others == nbytes + (72 if how == "both are trained" else 0)


@pytest.mark.parametrize("reason", ["bf16", "gaps"])
def test_memory_that_can_not_be_kept_is_named(reason: str) -> None:
    model = nn.Linear(6, 6)
    held = model.weight.data
    options: Any = {"precision": "bf16"} if reason == "bf16" else {}
    if reason == "gaps":
        model.weight.data = held = torch.zeros(6, 12)[:, ::2]
    with pytest.warns(
        megatrain.HeldMemoryWarning, match=r"somebody else holds the memory of `weight` as well"
    ) as found:
        megatrain.compile(model, device="cpu", **options)(batch(0))
    assert "neither sees what the other writes" in str(found[0].message)
    assert held.shape == (6, 6)


def _of_parameter(model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    model[2].weight.data.mul_(2)


def _of_norm(model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    model[3].weight.data.mul_(2)


def _of_array(model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    array = model[0].weight.detach().numpy()
    np.multiply(array, 2, out=array)


def _of_input(model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    x.data.mul_(2)


def _of_output(model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    y.data.mul_(2)


def _by_memory(model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Eager's layer norm reads the new weight, its linear layers read the old one."""
    model[3].weight.data = model[3].weight.data * 2


@pytest.mark.parametrize("path", ["bind", "offload"])
def test_writes_that_torch_does_not_count_are_refused_before_a_backward(path: str) -> None:
    model = nn.Sequential(*build(), nn.Tanh()).eval()
    compiled = megatrain.compile(model, device="cpu", **PATHS[path])
    for write in (None, _of_parameter, _of_norm, _of_array, None, _of_input, _of_output, _by_memory, None):
        x = (batch(0).requires_grad_() * 1)[:, :]
        y = compiled(x)
        loss = y.square().sum()
        if write is None:
            loss.backward()
            continue
        write(model, x, y)
        with pytest.raises(ExecuteError, match=r"(parameter|value) `.*` was modified (in place )?between forward and"):
            loss.backward()


WIDTHS = (32, 64, 128, 256)


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight  # past what autograd saves, and past megatrain's hooks on that
        return x @ weight.t()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] @ ctx.weight, None


class Layer(nn.Module):
    def __init__(self, width: int, function: Any = Kept):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 64) / 8, requires_grad=False)
        self.out = nn.Linear(width, 64)
        self.function = function

    def forward(self, x):
        return self.out(self.function.apply(x, self.weight.view(-1, 64)).tanh())


def net(seed: int, function: Any = Kept) -> nn.Sequential:
    dice = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(*(Layer(dice.choice(WIDTHS), function) for _ in range(9)))


@pytest.mark.parametrize(("seed", "memory", "activations"), [(4, "690KiB", "auto"), (1, "900KiB", "keep")])
def test_a_backward_after_another_call_reads_the_weights_of_its_own_block(
    seed: int, memory: str, activations: str
) -> None:
    eager = net(seed)
    streamed = copy.deepcopy(eager)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    compiled = megatrain.compile(streamed, device="cpu", memory=memory, activations=activations)
    try:
        result = compiled(x)
    except ScheduleError:
        assert activations == "keep"  # the copies count, so that this budget holds no graph of all blocks
        return
    compiled(x + 1)  # other weights lie in the slots now
    result.square().sum().backward()
    eager(x).square().sum().backward()
    assert_same({n: p.grad for n, p in eager.named_parameters()}, {n: p.grad for n, p in streamed.named_parameters()})
    assert compiled.peak_bytes <= parse_bytes(memory)
