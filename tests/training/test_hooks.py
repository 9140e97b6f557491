"""Hooks that give a gradient another shape or dtype are refused in the backward, and block nothing afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatrain.errors import ExecuteError
from tests.comparing import assert_same, snapshot
from tests.tiers import diagonal
from tests.training.parity import MODES, SideBySide, adamw, sgd

NAME = "layers.1.fc.weight"
WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "fewer rows": lambda g: g[:1],
    "flat": lambda g: g.reshape(-1),
    "another dtype": lambda g: g.double(),
    "narrower": lambda g: g.bfloat16(),
    "sparse": lambda g: g.to_sparse(),
    "no tensor": lambda g: 3.0,
}


def batch(number: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(number))


def fused(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def refused(sides: SideBySide) -> None:
    """Takes a step that fails, which leaves no trace."""
    torch.manual_seed(7)
    before = snapshot(sides.eager, sides.eager_optimizer)
    with pytest.raises(ExecuteError, match=r"^d2h:G\d failed: ExecuteError: a hook on a gradient made "):
        sides.step(batch(7))
    sides.step.flush()
    torch.manual_seed(7)
    assert_same(before, snapshot(sides.streamed, sides.optimizer))


@pytest.mark.parametrize(("wrong", "mode"), diagonal(WRONG, MODES))
def test_a_wrong_gradient_is_refused_and_blocks_nothing(wrong: str, mode: str) -> None:
    sides = SideBySide.of("hazardous", fused if mode == "deferred" else sgd, **MODES[mode])
    for number in range(2):
        sides.take(batch(number), seed=number)
    handle = sides.streamed.get_parameter(NAME).register_hook(WRONG[wrong])
    try:
        refused(sides)
    finally:
        handle.remove()
    for number in range(2, 4):
        sides.take(batch(number), seed=number)
    sides.assert_same()


@pytest.mark.parametrize("mode", ["overlap", "deferred"])
def test_a_gradient_that_is_resized_where_it_is_left_is_refused(mode: str) -> None:
    sides = SideBySide.of("hazardous", sgd, **MODES[mode])
    sides.take(batch(0), seed=0)

    def resize(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.data[:1]

    handle = sides.streamed.get_parameter("head.weight").register_post_accumulate_grad_hook(resize)
    try:
        refused(sides)
    finally:
        handle.remove()
    sides.take(batch(1), seed=1)
    sides.assert_same()


def test_updates_wait_for_the_last_gradient_where_a_hook_may_end_the_backward() -> None:
    """Without the hook they go beside the backward."""
    sides = SideBySide.of("hazardous", sgd)
    sides.take(batch(0), seed=0)
    assert sides.step.schedule.kind.updates == "overlap"
    handle = sides.streamed.get_parameter("layers.0.fc.weight").register_hook(lambda gradient: None)
    sides.take(batch(1), seed=1)
    assert sides.step.schedule.kind.updates == "serial"
    handle.remove()
    sides.take(batch(2), seed=2)
    assert sides.step.schedule.kind.updates == "overlap"
    sides.assert_same()


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_gradient_in_a_backward_of_ones_own_is_refused_as_in_eager(wrong: str) -> None:
    sides = SideBySide.of("stack", adamw)
    x = torch.randn(2, 3)
    errors = []
    for model in (sides.eager, sides.compiled):
        handle = next(model.parameters()).register_hook(WRONG[wrong])
        try:
            with pytest.raises((RuntimeError, TypeError)) as caught:
                model(x).sum().backward()
        finally:
            handle.remove()
        errors.append(caught.type)
        model.zero_grad()
    assert errors[0] is errors[1]
    for model in (sides.eager, sides.compiled):
        model(x).sum().backward()
    grads = [{n: p.grad for n, p in m.named_parameters()} for m in (sides.eager, sides.streamed)]
    assert_same(grads[0], grads[1], "gradients")
    sides.compiled.zero_grad()


def test_a_right_gradient_of_a_hook_counts() -> None:
    sides = SideBySide.of("hazardous", adamw, max_grad_norm=0.5)
    handles = [
        m.get_parameter(NAME).register_hook(lambda g: g.t().contiguous().t() * 2) for m in (sides.eager, sides.streamed)
    ]
    for number in range(3):
        sides.take(batch(number), seed=number)
    sides.assert_same()
    for handle in handles:
        handle.remove()
