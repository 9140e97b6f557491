"""plan.check(): what is missing, and changes that make the step fit, each found by a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import ExecuteError, ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.planning.advice import MOST, ways_out, words
from megatrain.planning.host_plan import MICRO_BATCH, SEQUENCE
from megatrain.sizes import format_bytes
from tests.planning.steps import IDS, made, planned

# Steps whose blocks aren't cut where they don't fit.
OWN_BLOCKS: dict[str, Any] = {"chunking": "never"}


def again(values: dict[str, Any], **options: Any) -> megatrain.Plan:
    rows, columns = values.pop(MICRO_BATCH, IDS.shape[0]), values.pop(SEQUENCE, IDS.shape[1])
    return planned(ids=torch.zeros(rows, columns, dtype=torch.long), **{**options, **values})


@pytest.mark.parametrize(
    "options",
    [
        {"device_memory": "480KiB", **OWN_BLOCKS},
        {"host_memory": "1800KiB"},
    ],
)
def test_each_way_out_fits_and_is_what_plan_gives(options: dict[str, Any]):
    plan = made(**options)
    assert not plan.fits
    ways = ways_out(plan)
    assert 1 <= len(ways) <= MOST
    for way in ways:
        found = again(dict(way.change), **options)
        assert found.fits, way.change
        assert str(found) == str(way.plan)
    times = [way.cost()[0] for way in ways]
    assert times == sorted(times)
    with pytest.raises((ScheduleError, ExecuteError)) as caught:
        plan.check()
    for way in ways:
        assert f"\n    {words(way.change)}: " in str(caught.value)


@pytest.mark.nightly
def test_of_degrees_the_first_that_fits_is_taken():
    ids = torch.zeros(64, 8, dtype=torch.long)
    plan = planned(ids=ids, device_memory="1MiB", **OWN_BLOCKS)
    ways = [dict(way.change) for way in ways_out(plan)]
    assert {"sequence": 2} in ways
    for length in (2, 3, 4):
        found = planned(ids=ids[:, :length], device_memory="1MiB", **OWN_BLOCKS)
        assert found.fits == (length == 2)
    for values in ways:
        assert values.get("micro_batch", 64) * values.get("micro_batches", 2) in (128, 64), "no way does both at once"


def test_the_error_says_how_much_is_missing_and_what_sets_it():
    plan = made(device_memory="480KiB", **OWN_BLOCKS)
    with pytest.raises(ScheduleError) as caught:
        plan.check()
    text = str(caught.value)
    assert text.startswith(f"a memory of 491520 B is too small: at least {plan.schedule.device_bytes} B are needed")
    assert "set by block 3 (layers.2)" in text
    assert f"What helps: {format_bytes(plan.missing_device_bytes)} more of the device, or one of these, each" in text
    assert " x this one's time a token), " in text


def test_what_fits_has_no_error():
    made().check()
    assert made().refused() is None


def test_a_step_that_nothing_rescues_says_so():
    with pytest.raises(ScheduleError, match="no other change that was tried makes it fit"):
        planned(device_memory="4KiB", host_memory="40KiB", hardware=None).check()


def test_a_time_is_said_only_for_a_machine():
    with pytest.raises(ScheduleError) as caught:
        made(device_memory="480KiB", **OWN_BLOCKS, hardware=None).check()
    assert " a step (" not in str(caught.value)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.nightly
def test_the_plan_that_parks_less_is_taken_where_the_host_needs_it():
    """Where compute is slow, graphs save more time than activations that stay; but the host has to have the room."""
    slow = Hardware(1e11, 1e11, 1e9)

    def on_slow(host_memory: int | str, hardware: Hardware | None = slow) -> megatrain.Plan:
        options: dict[str, Any] = {"device_memory": 2_500_000, "optimizer": "AdamW", "host_memory": host_memory}
        return megatrain.plan(Layers(), torch.zeros(1024, 32), hardware=hardware, **options)

    fast, frugal = on_slow("1GiB"), on_slow("1GiB", None)
    assert fast.host.total_bytes > frugal.host.total_bytes
    tight = on_slow(frugal.host.total_bytes)
    assert tight.fits
    assert tight.schedule == frugal.schedule
    assert on_slow(fast.host.total_bytes).schedule == fast.schedule
