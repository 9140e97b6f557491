"""A loss may do with the model's results what it may do in eager: write into them, hook them, keep their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import megatrain
from tests.comparing import assert_same, snapshot
from tests.tiers import diagonal
from tests.training.parity import MODES, SideBySide, adamw, gpt_batch, loop_step, sgd, stack_batch


def divided(result: Any, batch: Any) -> torch.Tensor:
    result /= 3.0
    return result.square().mean()


def masked(result: Any, batch: Any) -> torch.Tensor:
    result[:, 0] = 0.0
    return result.exp().mean()


def scaled(result: Any, batch: Any) -> torch.Tensor:
    loss = result.square().mean()
    loss *= 0.5
    return loss


def summed(result: Any, batch: Any) -> torch.Tensor:
    return result.sum() + (result * result.detach()).mean() + result.t().matmul(result).mean()


def hooked(result: Any, batch: Any) -> torch.Tensor:
    result.register_hook(lambda g: g * 2)
    return result.square().mean()


LOSSES: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "divided": divided,
    "masked": masked,
    "scaled": scaled,
    "summed": summed,
    "hooked": hooked,
}


@pytest.mark.parametrize(("loss", "mode"), diagonal(LOSSES, ["overlap", "deferred"]))
def test_a_loss_that_writes_into_results_has_eagers_bits(loss: str, mode: str) -> None:
    sides = SideBySide.of("stack", adamw, **MODES[mode])
    step = megatrain.TrainStep(sides.compiled, sides.optimizer, loss=LOSSES[loss], **MODES[mode])
    for number in range(3):
        batches = [stack_batch(number, 2), stack_batch(number + 10, 2)]
        expected, _ = loop_step(sides.eager, sides.eager_optimizer, batches, loss=LOSSES[loss], max_norm=sides.max_norm)
        assert_same(expected, step(batches), number)
    step.flush()
    assert_same(snapshot(sides.eager, sides.eager_optimizer), snapshot(sides.streamed, sides.optimizer))


def test_the_models_own_loss_may_be_scaled_in_place() -> None:
    sides = SideBySide.of("gpt", sgd)
    step = megatrain.TrainStep(sides.compiled, sides.optimizer, loss=lambda result, _: result[1].mul_(0.5))
    for number in range(2):
        batch = gpt_batch(number, 2)
        torch.manual_seed(number)
        expected, _ = loop_step(sides.eager, sides.eager_optimizer, batch, loss=lambda result, _: result[1].mul_(0.5))
        torch.manual_seed(number)
        assert_same(expected, step(batch), number)
    sides.step.flush()
    assert_same(snapshot(sides.eager, sides.eager_optimizer), snapshot(sides.streamed, sides.optimizer))


def test_results_are_no_leaves_and_keep_their_gradient_if_asked() -> None:
    sides = SideBySide.of("stack", sgd)
    found = []

    def loss(result: Any, batch: Any) -> torch.Tensor:
        assert not result.is_leaf
        result.retain_grad()
        found.append(result)
        return result.square().mean()

    step = megatrain.TrainStep(sides.compiled, sides.optimizer, loss=loss)
    loop_step(sides.eager, sides.eager_optimizer, stack_batch(0, 2), loss=loss)
    step(stack_batch(0, 2))
    assert_same(found[0].grad, found[1].grad)
