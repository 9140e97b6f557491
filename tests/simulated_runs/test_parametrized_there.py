"""Parametrizations within a forward on the simulated device: in steps, in code that runs again, and in walks."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from tests.parametrized import KINDS, OPAQUE, WIDTH, model_of
from tests.runtime.parity import assert_same
from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import DEVICE, choose, trained

X = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("order", ["early", "late", "seeded"])
@pytest.mark.parametrize("make", [KINDS["two"], KINDS["a buffer"], OPAQUE["two"]], ids=["two", "a buffer", "opaque"])
def test_training_there_equals_eager_there(sim: Simulator, make: Any, order: Any):
    model = model_of(make)
    eager, streamed = copy.deepcopy(model).to(DEVICE), model
    random.seed(0)
    expected = trained(eager, eager, (X,), {}, steps=3)
    compiled = megatrain.compile(streamed, device=DEVICE, memory="64KiB" if make in OPAQUE.values() else "24KiB")
    choose(sim, order)
    random.seed(0)
    assert_same(expected, trained(compiled, streamed, (X,), {}, steps=3))
    assert len(compiled.program.blocks) >= 3


@pytest.mark.parametrize("order", ["early", "late", "seeded"])
def test_a_walk_between_steps_finds_and_leaves_the_weights_as_eager_does(sim: Simulator, order: Any):
    streamed, eager = model_of(KINDS["two"]), model_of(KINDS["two"]).to(DEVICE)
    compiled = megatrain.compile(streamed, device=DEVICE, memory="24KiB")
    keys = list(streamed.state_dict())
    for number in range(3):
        x = (X + number).to(DEVICE)
        choose(sim, order)
        with torch.no_grad():
            expected = eager(x).cpu()
            with compiled.megatrain.walk():
                assert_same(expected, compiled(x).cpu())
        for call, model in ((eager, eager), (compiled, streamed)):
            call(x).backward()
            _update(model)
        assert_same([p.cpu() for p in eager.parameters()], [p.cpu() for p in streamed.parameters()])
    assert list(streamed.state_dict()) == keys
    assert not any(p.device != torch.device("cpu") for p in streamed.parameters())


@torch.no_grad()
def _update(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None
