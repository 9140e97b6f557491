"""fp16's loss scaling, with gradients on the host and losses on a device whose copies come late."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.device import find
from megatrain.optim.grad_scaler import host_scaler, warn_of_torchs_own
from tests.simulated_device.simulator import OrderName, Simulator
from tests.simulated_runs.on_device import DEVICE


def scaled_steps(scaler: torch.amp.GradScaler, factors: list[float]) -> tuple[list[bool], float]:
    """Trains with losses multiplied by factors; returns which steps were taken, and the scale at the end."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    compiled = megatrain.compile(model, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken: list[bool] = []
    for factor in factors:
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(compiled(torch.ones(2, 3, device=DEVICE)).sum() * factor).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        taken.append(not torch.equal(model.weight, before))
    assert bool(model.weight.isfinite().all())
    return taken, scaler.get_scale()


@pytest.mark.parametrize("order", ["late", "early", "seeded"])
def test_an_update_with_infinite_gradients_is_left_out(sim: Simulator, order: OrderName):
    sim.order(order)
    taken, scale = scaled_steps(megatrain.GradScaler(init_scale=8.0), [1.0, float("inf"), 1.0, float("nan"), 1.0])
    assert taken == [True, False, True, False, True]
    assert scale == 2.0


def test_it_goes_on_from_another_scaler(sim: Simulator):
    other = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3, backoff_factor=0.25)
    scaler = host_scaler(other)
    assert scaler.state_dict() == other.state_dict()
    assert scaled_steps(scaler, [1.0, float("inf")]) == ([True, False], 1.0)


def warned(make: Any) -> list[Any]:
    gc.collect()  # scalers of other tests
    kept = make()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_torchs_own([torch.float16], find(DEVICE))
    del kept
    return [each for each in said if each.category is megatrain.GradScalerWarning]


def test_torchs_own_scaler_is_warned_of(sim: Simulator):
    assert not warned(megatrain.GradScaler)
    assert warned(lambda: torch.amp.GradScaler("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_torchs_own([torch.float16], find("cpu"))
        warn_of_torchs_own([torch.bfloat16], find(DEVICE))
