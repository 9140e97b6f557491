"""A loss may do with the model's results what it may do in eager: write into them, hook them, keep their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import megatrain
from tests.comparing import assert_same, snapshot
from tests.training.loops import MODES, Pair, adamw, eager_step, gpt_batch, sgd, stack_batch


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


@pytest.mark.parametrize("mode", ["overlap", "deferred"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_writes_into_results_has_eagers_bits(loss: str, mode: str) -> None:
    pair = Pair.of("stack", adamw, **MODES[mode])
    step = megatrain.TrainStep(pair.compiled, pair.optimizer, loss=LOSSES[loss], **MODES[mode])
    for number in range(3):
        batches = [stack_batch(number, 2), stack_batch(number + 10, 2)]
        expected, _ = eager_step(pair.eager, pair.eager_optimizer, batches, loss=LOSSES[loss], max_norm=pair.max_norm)
        assert_same(expected, step(batches), number)
    step.flush()
    assert_same(snapshot(pair.eager, pair.eager_optimizer), snapshot(pair.stepped, pair.optimizer))


def test_the_models_own_loss_may_be_scaled_in_place() -> None:
    pair = Pair.of("gpt", sgd)
    step = megatrain.TrainStep(pair.compiled, pair.optimizer, loss=lambda result, _: result[1].mul_(0.5))
    for number in range(2):
        batch = gpt_batch(number, 2)
        torch.manual_seed(number)
        expected, _ = eager_step(pair.eager, pair.eager_optimizer, batch, loss=lambda result, _: result[1].mul_(0.5))
        torch.manual_seed(number)
        assert_same(expected, step(batch), number)
    pair.step.flush()
    assert_same(snapshot(pair.eager, pair.eager_optimizer), snapshot(pair.stepped, pair.optimizer))


def test_results_are_no_leaves_and_keep_their_gradient_if_asked() -> None:
    pair = Pair.of("stack", sgd)
    found = []

    def loss(result: Any, batch: Any) -> torch.Tensor:
        assert not result.is_leaf
        result.retain_grad()
        found.append(result)
        return result.square().mean()

    step = megatrain.TrainStep(pair.compiled, pair.optimizer, loss=loss)
    eager_step(pair.eager, pair.eager_optimizer, stack_batch(0, 2), loss=loss)
    step(stack_batch(0, 2))
    assert_same(found[0].grad, found[1].grad)
