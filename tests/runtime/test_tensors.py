"""Unusual tensors as parameters, buffers and inputs, and writes into them: all bit for bit as in eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import ExecuteError
from tests.comparing import assert_same_state
from tests.runtime.parity import PATHS, assert_parity_of, seeded

P = nn.Parameter


class Odd(nn.Module):
    """Its layers have parameters and buffers of each unusual kind; each of them is a block."""

    mask: torch.Tensor
    index: torch.Tensor
    expanded: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.low, self.wide = nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4, dtype=torch.float64)
        self.phase = P(torch.randn(2, dtype=torch.complex128))
        self.factor, self.empty = P(torch.tensor(2.0)), P(torch.empty(0, 3))
        self.turned, self.sliced = P(torch.randn(4, 4).t()), P(torch.randn(8)[::2])
        self.last = P(torch.randn(3, 3, 2, 2).to(memory_format=torch.channels_last))
        self.cell = nn.LSTM(4, 4, 2)  # its weights are in one storage
        both = torch.randn(8)
        self.left, self.right = P(both[:4]), P(both[4:])
        self.table = nn.Embedding(10, 4, sparse=True)
        self.norms = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))
        self.norms[2][1].running_mean = self.norms[0][1].running_mean
        self.alias = self.norms[0][0]
        self.factors, self.shifts = nn.ParameterList([torch.randn(4)]), nn.ParameterDict({"a": P(torch.randn(()))})
        self.register_buffer("bias", self.norms[1][0].bias)  # a parameter that is a buffer too
        self.register_buffer("mask", torch.tensor([True, False, True, False]))
        self.register_buffer("index", torch.arange(3))
        self.register_buffer("expanded", torch.randn(1).expand(4))
        self.register_buffer("trained", torch.ones(4, requires_grad=True))

    def forward(self, x, ids, scale):
        x = self.low(x.bfloat16()).float() * self.factor * scale
        pairs = torch.view_as_complex(self.wide(x.double()).reshape(-1, 2, 2).contiguous()) * self.phase
        x = x + torch.view_as_real(pairs).reshape(-1, 4).float()
        x = torch.where(self.mask, x, x * 2) + self.index.sum() + self.empty.sum()
        image = x[:, None, :2, None].expand(-1, 3, 2, 2)
        x = x @ self.turned + self.sliced * self.expanded + nn.functional.conv2d(image, self.last).sum()
        x = self.cell(x[None])[0][0] * self.left + self.right + self.table(ids)
        x = nn.functional.one_hot(ids, 10).float() @ self.table.weight + x  # a dense gradient as well
        with torch.no_grad():
            weight = self.norms[0][0].weight[:]
        for norm in self.norms:
            x = norm(x @ weight)
        for name in self.shifts:
            x = x * self.factors[0] + self.shifts[name]
        x = self.alias(x) * self.bias * self.trained
        return x, pairs, self.index + 1, self.mask.clone(), self.empty * 2, x.half(), x.to(torch.complex64), scale


@pytest.mark.parametrize("path", PATHS)
def test_unusual_tensors_in_one_model(path: str) -> None:
    def drive(call, model):
        found = []
        for number in range(2):
            x, scale = rows().requires_grad_(), torch.tensor(3.0, requires_grad=True)
            results = call(x, (torch.arange(5) * 3 + number) % 4, scale)
            losses = [t.abs().double().square().sum() for t in results if t.requires_grad]
            torch.stack(losses).sum().float().backward()
            found += [*(t.detach() for t in results), x.grad, scale.grad, model.trained.grad.clone()]
        return found

    assert_parity_of(seeded(Odd), drive, **PATHS[path])


def rows(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1))


def test_parameters_that_overlap_are_refused() -> None:
    both = torch.randn(8)
    model = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4))
    model[0].weight, model[1].weight = P(both[:4]), P(both[3:7])
    with pytest.raises(ExecuteError, match="share memory, but not as one tied tensor"):
        megatrain.compile(model, device="cpu")(rows())


class Energy(nn.Module):
    """Returns a sum and its gradient, as models of molecules do."""

    def __init__(self, by: str):
        super().__init__()
        self.by = by
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.top = nn.Linear(4, 1)

    def forward(self, x):
        with torch.enable_grad():
            x = x if self.by == "input" else x.detach().clone().requires_grad_()
            y = x
            for layer in self.layers:
                y = torch.tanh(layer(y))
            energy = self.top(y).sum()
            source: Any = self.layers[1].weight if self.by == "weight" else x
            (slope,) = torch.autograd.grad(energy, source, create_graph=True)
        return energy, -slope


@pytest.mark.parametrize("by", ["input", "weight"])
def test_gradients_inside_the_forward(by: str) -> None:
    def drive(call, model):
        x = rows().requires_grad_(by == "input")
        with torch.no_grad():
            before = [t.detach() for t in call(x)]
        energy, slope = call(x)
        (energy.square() + slope.square().sum()).backward()
        return before, energy, slope, x.grad

    assert_parity_of(seeded(lambda: Energy(by)), drive)


class Writes(nn.Module):
    """Masks its input in place, reads it before and after, and hands it back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, mask):
        mask[0] = True
        hidden = self.first(x * 1)
        x.mul_(2)
        x[:1].add_(hidden.detach()[:1])
        hidden = torch.where(mask.clone()[:, None], self.second(hidden + x.clone()), hidden)
        mask.logical_not_()
        return hidden, x


def inputs(step: int, layout: str) -> list[torch.Tensor]:
    torch.manual_seed(step)
    wide = torch.randn(4, 8)
    x = {"dense": wide[:, :4].clone(), "view": wide[:, ::2], "turned": wide[:, :4].clone().t()}[layout]
    return [x, torch.tensor([False, True, False, False])]


def test_inputs_hold_what_eager_leaves_there() -> None:
    torch.manual_seed(0)
    eager = Writes()
    compiled = megatrain.compile(copy.deepcopy(eager), device="cpu", **PATHS["offload"])
    for step, layout in enumerate(("dense", "view", "turned", "dense")):
        left, right = inputs(step, layout), inputs(step, layout)
        expected, found = eager(*left), compiled(*right)
        assert found[1] is right[0]
        for a, b in zip([*expected, *left], [*found, *right], strict=True):
            assert torch.equal(a, b)
        expected[0].square().sum().backward(retain_graph=True)
        found[0].square().sum().backward(retain_graph=True)
        expected[0].sum().backward()
        found[0].sum().backward()
        assert_same_state(eager, compiled)


def test_what_has_no_meaning_is_refused() -> None:
    compiled = megatrain.compile(Writes(), device="cpu")
    for call in (Writes(), compiled):
        x, mask = inputs(0, "dense")
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            call(x.requires_grad_(), mask)

    class Resets(Writes):
        def forward(self, x, mask):
            with torch.no_grad():
                x.zero_()
            return super().forward(x.clone(), mask)

    with pytest.raises(megatrain.TraceError, match="which requires a gradient"):
        megatrain.compile(Resets(), device="cpu")(inputs(0, "dense")[0].requires_grad_(), mask)

    class Leaks(Writes):
        def forward(self, x, mask):
            x.add_(self.first(x.clone()))
            return x

    with pytest.raises(megatrain.TraceError, match="into its input"):
        megatrain.compile(Leaks(), device="cpu")(*inputs(0, "dense"))

    class Both(nn.Linear):
        def forward(self, a, b):
            a.mul_(2)
            return super().forward(a + b)

    x = torch.randn(4, 4)
    with pytest.raises(megatrain.TraceError, match="shares memory with another input"):
        megatrain.compile(Both(4, 4), device="cpu")(x, x[:])


class Teacher(nn.Module):
    """Keeps a moving average of its own weights in parameters that aren't trained."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for mean, weight in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
        return (self.student(x) - self.teacher(x)).square().mean()


def test_trained_weights_are_not_written() -> None:
    model = Teacher()
    model.teacher.requires_grad_(True)
    with pytest.raises(megatrain.TraceError, match=r"writes into its parameter `teacher\.weight`"):
        megatrain.compile(model, device="cpu")(torch.ones(1, 4))
