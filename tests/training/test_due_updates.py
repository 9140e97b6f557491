"""What users do while updates are due: the numbers are those of a plain loop, where they would have been taken."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import megatrain
from tests.comparing import assert_same, snapshot
from tests.runtime.parity import seeded
from tests.training.parity import SideBySide, adamw, sgd, stack_batch


def test_a_hook_that_comes_while_updates_are_due_runs_from_the_next_step() -> None:
    sides = SideBySide.of("stack", sgd, max_grad_norm=0.5)
    sides.take(stack_batch(0, 2), seed=0)

    def slow(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    for optimizer in (sides.eager_optimizer, sides.optimizer):
        optimizer.register_step_post_hook(slow)
    for number in (1, 2):
        sides.take(stack_batch(number, 2), seed=number)
    sides.assert_same()


def test_a_second_step_over_an_optimizer_whose_very_first_updates_are_due() -> None:
    """In bf16 the optimizer's state says that masters are trained, and the first updates make it."""

    def trained(*, flushes: bool) -> dict[str, Any]:
        model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        compiled = megatrain.compile(model, device="cpu", precision="bf16")
        optimizer = adamw(model)
        for number in range(3):
            step = megatrain.TrainStep(
                compiled, optimizer, loss=lambda result, _: result.square().mean().float(), max_grad_norm=1.0
            )
            step(torch.randn(2, 8, generator=torch.Generator().manual_seed(number)))
            if flushes:
                step.flush()
        step.flush()
        return snapshot(model, optimizer)

    assert_same(trained(flushes=True), trained(flushes=False))
