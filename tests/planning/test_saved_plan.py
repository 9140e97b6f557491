"""Saved plans: written, read back equal, and compared in words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatrain import SavedPlan
from megatrain.errors import ScheduleError
from tests.planning.steps import made, planned


def test_a_saved_plan_is_read_back_equal():
    for options in ({}, {"hardware": None, "device_memory": None}, {"max_grad_norm": None, "micro_batches": 1}):
        saved = made(**options).saved()
        read = SavedPlan.from_json(saved.to_json())
        assert read == saved
        assert read.schedule.workload == saved.schedule.workload
        assert saved.diff(read) == "the plans are equal"
        assert read.to_json() == saved.to_json()


def test_a_saved_plan_says_what_was_asked_and_how_long_a_step_takes():
    plan = made()
    assert plan.simulation is not None
    assert str(plan.saved()).startswith(
        "saved plan: model Words, precision fp32, budget 600.00 KiB, machine rtx-4090, predicted "
    )
    assert plan.saved().step_s == plan.simulation.step_s


def test_a_difference_is_said_in_figures_before_and_after():
    plan, other = made(), made(device_memory="520KiB", hardware=None)
    lines = plan.diff(other).splitlines()
    assert lines[:3] == ["the other plan:", "  budget: 600.00 KiB -> 520.00 KiB", "  machine: rtx-4090 -> none"]
    sizes = f"device {plan.schedule.device_bytes} -> {other.schedule.device_bytes}"
    assert any(line.startswith(f"  bytes: {sizes}") for line in lines)
    assert not any("the model or its shapes" in line for line in lines)
    assert plan.diff(other.saved()) == plan.diff(other) == plan.saved().diff(other.saved())
    assert plan.diff(planned()) == "the plans are equal"


def test_a_step_that_does_not_fit_has_no_choices_to_save():
    too_small = planned(device_memory="64KiB")
    for call in (too_small.saved, lambda: too_small.diff(made()), lambda: made().diff(too_small)):
        with pytest.raises(ScheduleError, match="is too small"):
            call()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError"),
        ('{"format": 1}', "format 1 of a plan is unknown"),
        ({"schedule": {}}, "OptionError"),
        ({"workload": {}}, "these data aren't a workload"),
        ({"precision": "int3"}, "precision"),
        ({"device_memory": "lots"}, "device_memory"),
        ({"device_memory": True}, "device_memory"),
        ({"step_s": -1.0}, "step_s"),
        ({"model": 3}, "model"),
        ({"hardware": None}, "hardware"),
    ],
)
def test_what_is_no_plan_is_refused(text: str | dict[str, Any], said: str):
    """A text, or what is changed in that of a plan."""
    if isinstance(text, dict):
        text = json.dumps({**json.loads(made().saved().to_json()), **text})
    with pytest.raises(ScheduleError, match=said):
        SavedPlan.from_json(text)


def test_a_plan_whose_schedule_is_not_safe_is_refused():
    data = json.loads(made().saved().to_json())
    data["schedule"] = data["schedule"].replace("device: ", "device: 1", 1)
    with pytest.raises(ScheduleError):
        SavedPlan.from_json(json.dumps(data))
