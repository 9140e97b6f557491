"""Forwards that write into their inputs, or into weights that aren't trained, leave what eager leaves."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import megatrain
from tests.comparing import assert_same_state
from tests.runtime.parity import PATHS


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


@pytest.mark.parametrize("layout", ["dense", "view", "turned"])
@pytest.mark.parametrize("mode", PATHS)
def test_inputs_hold_what_eager_leaves_there(mode: str, layout: str) -> None:
    torch.manual_seed(0)
    eager = Writes()
    compiled = megatrain.compile(copy.deepcopy(eager), device="cpu", **{**PATHS[mode], "block_bytes": 1})
    for step in range(3):
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


class Branches(Writes):
    def forward(self, x, mask):
        x.abs_()
        return super().forward(x if x.sum() > 3 else x * 2, mask)


def test_guards_compute_on_copies() -> None:
    eager = Branches()
    compiled = megatrain.compile(copy.deepcopy(eager), device="cpu")
    for scale in (1.0, 0.01, 2.0):
        left, right = inputs(1, "dense"), inputs(1, "dense")
        left[0] *= scale
        right[0] *= scale
        assert torch.equal(eager(*left)[0], compiled(*right)[0])
        assert torch.equal(left[0], right[0])


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


@pytest.mark.parametrize("mode", PATHS)
def test_a_moving_average_in_the_forward(mode: str) -> None:
    torch.manual_seed(0)
    eager = Teacher()
    streamed = copy.deepcopy(eager)
    compiled = megatrain.compile(streamed, device="cpu", **{**PATHS[mode], "block_bytes": 1})
    optimizers = [torch.optim.SGD(m.student.parameters(), 0.1) for m in (eager, streamed)]
    for step in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        for call, optimizer in zip((eager, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            call(x).backward()
            optimizer.step()
        for (name, a), b in zip(eager.state_dict().items(), streamed.state_dict().values(), strict=True):
            assert torch.equal(a, b), name


def test_trained_weights_are_not_written() -> None:
    model = Teacher()
    model.teacher.requires_grad_(True)
    with pytest.raises(megatrain.TraceError, match=r"writes into its parameter `teacher\.weight`"):
        megatrain.compile(model, device="cpu")(torch.ones(1, 4))
