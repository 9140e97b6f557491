"""Host memory of compiled models on the simulated device: in pieces, through a ring, unlocked when copies are done."""

from __future__ import annotations

import gc
import mmap
from typing import Any

import pytest
import torch

import megatrain
from megatrain.memory import bus as buses
from megatrain.memory.ring import BUFFERS
from tests.gradients import grad_of
from tests.models import MODELS
from tests.runtime.parity import assert_same, train
from tests.simulated_device.adapter import SimulatedDevice
from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import choose
from tests.simulated_runs.test_training_there import eager, moved

PAGE = mmap.PAGESIZE
LEAST = 2 * BUFFERS * PAGE


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a page, and small rings: the models of the tests are small, too."""
    monkeypatch.setattr(SimulatedDevice, "lock_bytes", PAGE)
    monkeypatch.setattr(buses, "MOST_BYTES", 2 * LEAST)
    monkeypatch.setattr(buses, "LEAST_BYTES", LEAST)


@pytest.mark.usefixtures("small")
@pytest.mark.filterwarnings("ignore::megatrain.PageLockWarning")
@pytest.mark.parametrize("way", ["pieces", "a ring", "ordinary copies"])
def test_training_has_the_bits_of_eager_whatever_can_be_locked(sim: Simulator, way: str):
    expected = eager("gpt_loss")
    gc.collect()
    for order in ("late", "seeded"):
        model, args, kwargs = MODELS["gpt_loss"]()
        if way != "pieces":  # the store comes first
            sim.fail_lock(0)
            sim.configure(lock_limit=sim.locked_bytes + (LEAST if way == "a ring" else 0))
        choose(sim, order, seed=1)
        compiled = megatrain.compile(model, device="sim", activations="offload")
        found = train(compiled, model, moved(args), moved(kwargs))
        sim.order("early")
        assert_same(expected, found, tolerance=0)
        assert way in (compiled.megatrain.engine.bus.note or "pieces").replace("transfers wait for", "ordinary copies")
        sim.configure(lock_limit=1 << 50)
        del compiled, model, found
        gc.collect()
    assert sim.violations() == []


def test_memory_is_unlocked_when_its_copies_are_done(sim: Simulator):
    sim.order("late")
    held = sim.locked_bytes
    model, args, kwargs = MODELS["gpt_loss"]()
    compiled = megatrain.compile(model, device="sim", activations="offload")
    compiled(*moved(args), **moved(kwargs))
    assert sim.locked_bytes > held
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    found = [
        parameter.detach().to("sim", non_blocking=True) for parameter in model.parameters()
    ]  # the user's own copies
    assert sim.pending(torch.accelerator.current_stream()) > 0
    del compiled, model
    gc.collect()
    assert sim.locked_bytes == held
    assert sim.violations() == []
    assert all(torch.equal(left, right.cpu()) for left, right in zip(expected, found, strict=True))


def test_gradients_are_page_locked(sim: Simulator):
    model, args, kwargs = MODELS["gpt_loss"]()
    compiled = megatrain.compile(model, device="sim")
    places: list[Any] = []
    for _ in range(2):
        compiled(*moved(args), **moved(kwargs))[1].backward()
        assert all(grad_of(p).is_pinned() for p in model.parameters())
        places.append([grad_of(p).data_ptr() for p in model.parameters()])
        model.zero_grad()
    assert places[0] == places[1]
    weight = next(model.parameters())
    assert torch.equal(weight.to("sim").cpu(), weight)
    assert sim.violations() == []
