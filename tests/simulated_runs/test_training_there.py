"""Compiled training on the simulated device has the bits of eager training there, in every order of the streams."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import megatrain
from tests.models import MODELS
from tests.runtime.parity import Trained, assert_same, train
from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import choose

ORDERS = ["early", "late", "late but compute", "seeded"]


def moved(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to("sim"), value)


def eager(name: str) -> Trained:
    model, args, kwargs = MODELS[name]()
    model.to("sim")
    return train(model, model, moved(args), moved(kwargs))


def streamed(name: str, **options: Any) -> Trained:
    model, args, kwargs = MODELS[name]()
    compiled = megatrain.compile(model, device="sim", **options)
    return train(compiled, model, moved(args), moved(kwargs))


@pytest.mark.parametrize(("name", "activations"), [("gpt_loss", "offload"), ("mlp", "recompute")])
def test_training_has_the_bits_of_eager_in_every_order(sim: Simulator, name: str, activations: str):
    expected = eager(name)
    for order in ORDERS:
        choose(sim, order, seed=1)
        found = streamed(name, activations=activations)
        sim.order("early")
        assert_same(expected, found, tolerance=0)
    assert sim.violations() == []


@pytest.mark.parametrize("order", ORDERS)
def test_steps_have_the_bits_of_a_loop(sim: Simulator, order: str):
    def losses(model: Any, call: Any, kwargs: dict[str, Any]) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        torch.manual_seed(3)
        found: list[float] = []
        for _ in range(3):
            loss = call(**kwargs)[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    model, args, kwargs = MODELS["gpt_loss"]()
    kwargs = moved({**dict(zip(("ids", "targets"), args, strict=False)), **kwargs})
    reference = copy.deepcopy(model).to("sim")
    expected = losses(reference, reference, kwargs)
    choose(sim, order, seed=1)
    compiled = megatrain.compile(model, device="sim", activations="offload")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2, foreach=False)
    step = megatrain.TrainStep(compiled, optimizer, loss=lambda result, batch: result[1])
    torch.manual_seed(3)
    assert [step(kwargs).item() for _ in range(3)] == expected
