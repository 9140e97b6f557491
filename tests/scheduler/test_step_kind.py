"""The kind of a step checks itself: no schedule has a contradictory one."""

from __future__ import annotations

from typing import Any

import pytest

import megatrain
from megatrain.errors import OptionError, ScheduleError
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.step_kind import StepKind
from tests.scheduler.workloads import trained


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize(
    "more", [{"micro_batches": 2}, {"updates": "overlap"}, {"clip": True}, {"outputs": "release"}], ids=str
)
def test_what_belongs_to_a_training_step_is_refused_of_other_modes(mode: str, more: dict[str, Any]):
    with pytest.raises(OptionError, match=f'mode="{mode}" with micro-batches, updates'):
        StepKind(mode, **more)
    assert StepKind(**more).is_training_step


@pytest.mark.parametrize(
    "wrong",
    [{"mode": "eval"}, {"transfer": "move"}, {"micro_batches": 0}, {"micro_batches": 10**12}, {"updates": "late"}],
    ids=str,
)
def test_parts_that_are_none_of_the_known_ones_are_refused(wrong: dict[str, Any]):
    (name,) = wrong
    with pytest.raises(OptionError, match=f"^{name}="):
        StepKind(**wrong)


def test_a_text_with_a_contradictory_kind_is_refused():
    plan = schedule(trained(3), updates="overlap")
    text = str(plan).replace("updates: overlap", "mode: forward\nupdates: overlap")
    with pytest.raises(ScheduleError, match="the header of the schedule contradicts itself: mode="):
        megatrain.Schedule.parse(text)


def test_a_header_says_nothing_twice():
    text = str(schedule(trained(3), updates="overlap"))
    with pytest.raises(ScheduleError, match="an earlier line says the same thing"):
        megatrain.Schedule.parse(text.replace("updates: overlap", "updates: overlap\nupdates: serial"))
