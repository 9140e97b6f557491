"""Advice about a plan: each step that it names is what megatrain.plan gives for the options that it names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.base.sizes import format_bytes
from megatrain.errors import ExecuteError, OptionError, ScheduleError
from megatrain.planning.advice import MOST, Alternatives, Changes, numbers_after, ways_out, words
from megatrain.planning.model_sizes import MICRO_BATCH, SEQUENCE
from megatrain.scheduler.bands import band_of, format_s
from tests.nightly import nightly
from tests.planning.steps import IDS, made, on_meta, planned

# -- alternatives ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table() -> Alternatives:
    return planned().alternatives


def again(changes: Changes, **options: Any) -> megatrain.Plan:
    """The step with changes, planned anew by the public function."""
    values = {**options, **changes}
    rows, columns = values.pop(MICRO_BATCH, IDS.shape[0]), values.pop(SEQUENCE, IDS.shape[1])
    return planned(ids=torch.zeros(rows, columns, dtype=torch.long), **values)


@pytest.mark.nightly
def test_each_row_is_the_plan_of_its_options(table: Alternatives):
    assert len(table.rows) > 10
    for row in table.rows:
        expected = again(row.change)
        assert str(row.plan) == str(expected), row.change
        assert row.plan is not None
        assert row.plan.schedule == expected.schedule
        assert row.fits == expected.fits
        assert expected.simulation is not None
        assert row.step_s == expected.simulation.step_s


def test_every_kind_of_change_is_there(table: Alternatives):
    names = {name for row in table.rows for name in row.change}
    assert names == {
        "device_memory",
        "micro_batch",
        "micro_batches",
        "overlap",
        "max_grad_norm",
        "precision",
        "optimizer",
    }


def test_the_front_is_what_nothing_beats(table: Alternatives):
    order = ("same", "rounding", "other")
    for row in table.rows:
        beaten = [
            other
            for other in table.rows
            if other.fits
            and order.index(other.numbers) <= order.index(row.numbers)
            and other.cost() != row.cost()
            and all(a <= b for a, b in zip(other.cost(), row.cost(), strict=True))
        ]
        if row in table.front():
            assert row.fits
            assert not beaten
        elif row.fits and not beaten:
            assert any(other.cost() == row.cost() for other in table.front())
    assert table.front()


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({}, "same"),
        ({"device_memory": 1}, "same"),
        ({"overlap": False}, "same"),
        ({"micro_batch": 2, "micro_batches": 4}, "rounding"),
        ({"block_bytes": 1}, "rounding"),
        ({"micro_batch": 2}, "other"),
        ({"micro_batches": 2}, "other"),
        ({"max_grad_norm": None, "overlap": True}, "other"),
        ({"precision": "bf16", "device_memory": 1}, "other"),
        ({"micro_batch": 2, "micro_batches": 4, "masters": "rounded"}, "other"),
    ],
)
def test_what_becomes_of_the_numbers(changes: Changes, numbers: str):
    assert numbers_after(changes) == numbers


def test_a_model_that_has_changed_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    plan = megatrain.plan(model, torch.ones(4, 8), optimizer="SGD")
    model[0].requires_grad_(False)
    _, *others = plan.alternatives.rows
    assert {row.refused for row in others} == {
        "the model has changed since it was planned: other parameters, or others of them are trained."
    }
    with pytest.raises(OptionError, match="the model has changed since it was planned"):
        plan.largest("micro_batch")


# -- ways out -------------------------------------------------------------------------------------------------


# Steps whose blocks aren't cut where they don't fit.
OWN_BLOCKS: dict[str, Any] = {"chunking": "never"}


@pytest.mark.parametrize(
    "options",
    [
        nightly({"device_memory": "480KiB", **OWN_BLOCKS}),
        {"host_memory": "1800KiB"},
    ],
)
def test_each_way_out_fits_and_is_what_plan_gives(options: dict[str, Any]):
    plan = made(**options)
    assert not plan.fits
    ways = ways_out(plan)
    assert 1 <= len(ways) <= MOST
    for way in ways:
        found = again(way.change, **options)
        assert found.fits, way.change
        assert str(found) == str(way.plan)
    times = [way.cost()[0] for way in ways]
    assert times == sorted(times)
    with pytest.raises((ScheduleError, ExecuteError)) as caught:
        plan.check()
    for way in ways:
        assert f"\n    {words(way.change)}: " in str(caught.value)


def test_the_error_says_how_much_is_missing_and_what_sets_it():
    plan = made(device_memory="480KiB", **OWN_BLOCKS)
    with pytest.raises(ScheduleError) as caught:
        plan.check()
    text = str(caught.value)
    assert text.startswith(f"a memory of 491520 B is too small: at least {plan.schedule.device_bytes} B are needed")
    assert "set by block 3 (layers.2)" in text
    assert f"What helps: {format_bytes(plan.missing_device_bytes)} more of the device, or one of these, each" in text
    assert " x this one's time a token), " in text


def test_a_step_that_nothing_rescues_says_so():
    with pytest.raises(ScheduleError, match="no other change that was tried makes it fit"):
        planned(device_memory="4KiB", host_memory="40KiB", hardware=None).check()


# -- the largest size -----------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("hardware", ["rtx-4090", None])  # the largest sequence has none
def test_the_largest_micro_batch_fits_and_the_next_does_not(hardware: str | None):
    found = planned(hardware=hardware).largest("micro_batch")
    assert found.size > 1
    largest, next_one = (
        planned(ids=torch.zeros(size, 8, dtype=torch.long), hardware=hardware) for size in (found.size, found.size + 1)
    )
    assert largest.fits
    assert not next_one.fits
    assert found.too_large == found.size + 1
    assert str(found.plan) == str(largest)
    assert str(found).startswith(f"largest micro_batch: {found.size}; at {found.size + 1}: ")


def test_what_can_not_change_is_refused_with_the_way_out():
    plan = planned()
    with pytest.raises(
        OptionError, match=r"(?s)the depth of this plan can't change: a model .*plan\.largest\(lambda n"
    ):
        plan.largest("depth")
    flat = megatrain.plan(nn.Linear(8, 8), torch.ones(4, 8))
    with pytest.raises(OptionError, match="the sequence of this plan can't change: the example has neither token ids"):
        flat.largest("sequence")
    two = megatrain.plan(nn.Bilinear(8, 8, 8), torch.ones(4, 3, 8), torch.ones(4, 3, 8))
    assert two.asked is not None
    assert two.asked.sizes == {"micro_batch": 4, "sequence": 3}
    with pytest.raises(OptionError, match="what='width' is a str"):
        plan.largest("width")
    with pytest.raises(OptionError, match="the function returned a Linear"):
        plan.largest(lambda size: nn.Linear(size, size))
    own = on_meta()
    with pytest.raises(OptionError, match="the optimizer of this plan has the parameters of its own model"):
        planned(own, optimizer=torch.optim.SGD(own.parameters())).largest(lambda size: (on_meta(), (IDS,)))


def test_a_step_of_which_no_size_fits_is_refused():
    with pytest.raises(ScheduleError, match=r"no micro_batch fits: at 1 .* of the device are missing"):
        planned(device_memory="100KiB").largest("micro_batch")


# -- reasons --------------------------------------------------------------------------------------------------


def test_the_figures_of_the_reasons_are_those_of_the_plan():
    plan = planned()
    simulation, text = plan.simulation, plan.why()
    assert simulation is not None
    lines = text.splitlines()
    assert lines[0].startswith(
        f"On rtx-4090 a step takes {format_s(simulation.step_s)}, {64 / simulation.step_s:.0f} tokens/s. "
    )
    band = band_of("plan", "", plan.schedule, simulation.timeline)
    assert abs(band.step_s - simulation.step_s) < 1e-9
    assert f"It is bound by {next(iter(band.shares))}, " in lines[0]
    assert band.then is not None
    assert f"would take {format_s(band.then.step_s)}, bound by {band.then.name}." in lines[0]
    bound = plan.lower_bound
    assert bound is not None
    above = f"{simulation.step_s / bound.seconds - 1:.1%}"
    least = f"No plan of these blocks in 600.00 KiB takes less than {format_s(bound.seconds)} ({bound.reason}): "
    assert lines[0].endswith(f"{least}this one takes {above} more.")
    assert f"The device's peak is {format_bytes(plan.schedule.device_bytes)} at B" in text
    assert f"The graphs of {len(plan.schedule.saves)} of 5 blocks are retained" in text
    assert f"The host holds {format_bytes(plan.host.total_bytes)}, " in text


def test_the_next_gib_is_planned():
    plan, more = planned(), planned(device_memory=f"{2**20 + 600}KiB")
    (line,) = (line for line in plan.why().splitlines() if line.startswith("With 1 GiB more"))
    assert plan.simulation is not None
    assert more.simulation is not None
    assert f"{len(more.schedule.saves)} retained graphs in place of {len(plan.schedule.saves)}" in line
    gain = 1 - more.simulation.step_s / plan.simulation.step_s
    assert f"a step would take {format_s(more.simulation.step_s)}, {gain:.1%} less." in line
    ample = planned(device_memory="1GiB").why()
    assert "With 1 GiB more of the device nothing would change." in ample
    assert "isn't bounded" in planned(device_memory=None).why()
    too_small = planned(device_memory="64KiB")
    assert too_small.lower_bound is None
    assert "With 1 GiB more of the device the step would fit." in too_small.why()
