"""The schedules of a call and of training steps, and a plan, of one small model: what a reader sees, whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import megatrain
from megatrain.passes.program import Program
from tests.models import Gpt

IDS = torch.zeros(2, 8, dtype=torch.int64)
Golden = Callable[[str, str], None]


@pytest.fixture(scope="module")
def program() -> Program:
    return megatrain.lower(megatrain.trace(Gpt(), (IDS, IDS)))


def test_the_schedule_of_a_call_that_parks_activations(program: Program, golden: Golden):
    plan = megatrain.schedule(program, memory="64KiB", activations="offload")
    plan.check()
    golden("schedule_call", str(plan))


def test_the_schedule_of_a_step_whose_updates_overlap_with_two_micro_batches(program: Program, golden: Golden):
    plan = megatrain.schedule(program, memory="64KiB", micro_batches=2, updates="overlap", outputs="release")
    plan.check()
    golden("schedule_overlap", str(plan))


def test_the_schedule_of_a_step_that_clips_and_so_defers_its_updates(program: Program, golden: Golden):
    plan = megatrain.schedule(program, memory="64KiB", updates="deferred", clip=True, outputs="release")
    plan.check()
    golden("schedule_deferred", str(plan))


def test_the_plan_of_a_step(golden: Golden):
    plan = megatrain.plan(
        Gpt(), IDS, IDS, device_memory="64KiB", host_memory="1MB", optimizer="AdamW", micro_batches=2, max_grad_norm=1.0
    )
    plan.check()
    golden("plan_step", str(plan))
