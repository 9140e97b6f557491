"""plan.alternatives: each row is what megatrain.plan gives for the options that the row names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import OptionError
from megatrain.planning.advice import Alternative, Alternatives, Changes, numbers_after, words
from megatrain.planning.host_plan import MICRO_BATCH
from megatrain.planning.planned_step import PlannedStep
from tests.nightly import nightly
from tests.planning.steps import IDS, planned


@pytest.fixture(scope="module")
def table() -> Alternatives:
    return planned().alternatives


def again(changes: Changes) -> PlannedStep:
    """The step of a row, planned anew by the public function."""
    values: dict[str, Any] = dict(changes)
    size = values.pop(MICRO_BATCH, len(IDS))
    return planned(ids=torch.zeros(size, IDS.shape[1], dtype=torch.long), **values)


@pytest.mark.parametrize("which", [slice(1), nightly(slice(1, None))], ids=["first of its kind", "others"])
def test_each_row_is_the_plan_of_its_options(table: Alternatives, which: slice):
    """Rows are of a kind if they change the same options."""
    assert len(table.rows) > 10
    kinds: dict[frozenset[str], list[Alternative]] = {}
    for row in table.rows:
        kinds.setdefault(frozenset(row.change), []).append(row)
    assert len(kinds) > 5
    for row in (row for rows in kinds.values() for row in rows[which]):
        expected = again(row.change)
        assert str(row.plan) == str(expected), row.change
        assert row.plan is not None
        assert row.plan.schedule == expected.schedule
        assert row.fits == expected.fits
        assert expected.simulation is not None
        assert row.step_s == expected.simulation.step_s


def test_the_first_row_is_the_plan_and_the_others_differ_from_it(table: Alternatives):
    first, *others = table.rows
    assert first.change == {}
    assert str(first.plan) == str(planned())
    assert len({tuple(row.change.items()) for row in table.rows}) == len(table.rows)
    assert all(row.change for row in others)


def test_a_step_that_is_split_in_another_way_has_the_same_samples(table: Alternatives):
    split = [row.change for row in table.rows if row.numbers == "rounding"]
    assert {(values[MICRO_BATCH], values["micro_batches"]) for values in split} == {(1, 8), (2, 4), (8, 1)}


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
    other = planned(precision="bf16", activations="keep", hardware=None).alternatives
    assert {"masters", "activations"} <= {name for row in other.rows for name in row.change}


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


def test_the_text_has_a_line_for_each_row_and_stars_on_the_front(table: Alternatives):
    lines = str(table).splitlines()[1:]
    head, rows = lines[0].split(), lines[1 : 1 + len(table.rows)]
    assert head == ["change", "numbers", "fits", "device", "host", "a", "step", "tokens/s"]
    for row, line in zip(table.rows, rows, strict=True):
        assert words(row.change) in line
        assert line.startswith("*") == (row in table.front())


def test_a_size_that_an_example_does_not_have_is_no_alternative():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    plan = megatrain.plan(model, torch.ones(4, 8), optimizer="SGD", micro_batches=2)
    assert "sequence" not in str(plan.alternatives)
    assert "tokens/s" not in str(plan.alternatives)
    assert plan.alternatives.front() == (), "no machine, no times"


def test_what_can_not_be_planned_says_why(table: Alternatives):
    row = Alternative({"optimizer": "LBFGS"}, None, refused="it needs all parameters at once.")
    text = str(Alternatives((table.rows[0], row)))
    assert 'optimizer="LBFGS"  other    refused' in text
    assert 'optimizer="LBFGS": it needs all parameters at once.' in text


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


def test_a_plan_without_its_model_has_no_alternatives():
    plan = planned()
    bare = megatrain.Plan(plan.program, plan.schedule, plan.host, None, None, "fp32")
    with pytest.raises(OptionError, match="this plan has no alternatives: it doesn't know its model"):
        _ = bare.alternatives
    with pytest.raises(OptionError, match="this plan can't change its sizes"):
        bare.largest("micro_batch")
    assert str(bare.why()).startswith("No time is known")
