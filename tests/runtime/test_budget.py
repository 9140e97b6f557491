"""The budget of device memory: found out once, refused or warned about where the device can't give it."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch

import megatrain
from megatrain.device import Device, Memory
from megatrain.device.reserve import MIB, beside, cublas_workspace, of_card
from megatrain.errors import DeviceMemoryWarning, OptionError
from megatrain.memory.device_budget import DeviceBudget
from tests.models import MODELS

GIB = 1 << 30


class Card(Device):
    """A device of its own memory, of which less is free each time somebody asks."""

    def __init__(self, free: int, total: int, falls_to: float = 0.1):
        super().__init__(torch.device("cpu"), "card")
        self.free, self.total, self.falls_to, self.num_asked = free, total, falls_to, 0

    def memory(self) -> Memory:
        self.num_asked += 1
        free, self.free = self.free, int(self.free * self.falls_to)
        return Memory(free, self.total)


def test_a_slot_with_half_the_lanes_is_named(monkeypatch: pytest.MonkeyPatch):
    compiled = megatrain.compile(MODELS["gpt_loss"]()[0])
    assert "the slot of the card" not in str(compiled.megatrain)
    monkeypatch.setattr(Device, "link_share", lambda _: 0.5)
    assert "\n  the slot of the card has 0.5 of the card's link to the host\n" in str(compiled.megatrain)
    # Its copies don't go over PCIe.
    monkeypatch.setattr(Device, "card", lambda _: "NVIDIA GH200 480GB")
    assert "the slot of the card" not in str(compiled.megatrain)


def test_memory_is_asked_once_for_all_schedules():
    """After the first step "free" is what the model itself has left, and later shapes would get next to nothing."""
    model, args, kwargs = MODELS["gpt_loss"]()
    card = Card(100_000, 100_000)
    compiled = megatrain.compile(model, device=card)
    assert "memory what is free, " in str(compiled.megatrain)
    compiled(*args, **kwargs)[1].backward()
    first = compiled.schedule
    assert "memory 87.89 KiB (what was free, less a reserve), " in str(compiled.megatrain)
    compiled(*(torch.cat([t, t]) for t in args), **{k: torch.cat([t, t]) for k, t in kwargs.items()})[1].backward()
    with torch.no_grad():
        compiled(*args, **kwargs)
    model.zero_grad()
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters()), loss=lambda out, _: out[1])
    batch = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    step([batch, batch])
    assert card.num_asked == 1
    assert (
        60_000
        < min(first.device_bytes, step.schedule.device_bytes)
        <= max(first.device_bytes, step.schedule.device_bytes)
        <= 90_000
    )


def test_a_plan_asks_no_device_and_changes_no_budget():
    model, args, kwargs = MODELS["gpt_loss"]()
    card = Card(100_000, 100_000)
    compiled = megatrain.compile(copy.deepcopy(model), device=card)
    megatrain.plan(model, *args, example_kwargs=kwargs)
    assert card.num_asked == 0
    compiled(*args, **kwargs)
    assert compiled.megatrain.budget.nbytes == 90_000


def test_more_than_the_device_has_is_refused():
    model, _, _ = MODELS["mlp"]()
    with pytest.raises(OptionError, match=r"^memory=2\.00 GiB is more than card has: 1\.00 GiB\.\n"):
        megatrain.compile(model, device=Card(GIB, GIB), memory="2GiB")
    assert megatrain.compile(model, device="cpu", memory="1PiB").megatrain.budget.nbytes == 1 << 50  # a rehearsal


def test_a_figure_leaves_the_reserve_of_the_device_free():
    budget = DeviceBudget(Card(80 * GIB, 80 * GIB), 79 * GIB)
    assert str(budget) == "79.00 GiB"
    assert budget.nbytes == 72 * GIB
    assert str(budget) == "72.00 GiB (79.00 GiB was given; the rest is a reserve)"
    small = DeviceBudget(Card(80 * GIB, 80 * GIB), 10 * GIB)
    assert (small.nbytes, str(small)) == (10 * GIB, "10.00 GiB")


def test_more_than_is_free_is_said_once():
    budget = DeviceBudget(Card(4 * GIB, 80 * GIB), 10 * GIB)
    with pytest.warns(DeviceMemoryWarning, match=r"memory=10\.00 GiB is more than is free: 4\.00 GiB of card are"):
        assert budget.nbytes == 10 * GIB
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert budget.nbytes == 10 * GIB


@pytest.mark.parametrize(
    ("card", "kept"), [(80 * GIB, 8 * GIB), (8 * GIB, GIB), (4 * GIB, GIB), (64 * MIB, 16 * MIB), (0, 0)]
)
def test_the_reserve_of_an_accelerator(card: int, kept: int):
    assert of_card(card) == kept


def test_the_reserve_beside_a_schedule_is_that_of_the_smallest_card_for_it():
    for nbytes in (9 * GIB, 10 * GIB, 72 * GIB, 4 * GIB):
        assert of_card(nbytes + beside(nbytes)) == pytest.approx(beside(nbytes), abs=1)


@pytest.mark.parametrize(
    ("capability", "config", "nbytes"),
    [
        ((9, 0), None, 32 * MIB),
        ((8, 6), None, 8 * MIB + 128 * 1024),
        ((9, 0), ":4096:8", 32 * MIB),
        ((9, 0), ":16:8", 128 * 1024),
        ((8, 0), ":4096:2:16:8", 8 * MIB + 128 * 1024),
        ((8, 0), "nonsense", 8 * MIB + 128 * 1024),
    ],
)
def test_workspaces_of_cublas_are_those_of_torch(capability: Any, config: str | None, nbytes: int):
    assert cublas_workspace(capability, config) == nbytes
