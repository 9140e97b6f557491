"""The bound of a step's seconds: no plan is faster, and some plans are nearly as fast."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.bound import step_bound
from megatrain.scheduler.builder.build import build
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.every_plan import fastest_of_all
from tests.scheduler.test_search import MACHINES, chains, memories
from tests.scheduler.test_times import SHARED
from tests.scheduler.workloads import chain, step_schedules, with_updates, workloads

STEPS = st.builds(
    lambda number, updates, clip, reports: StepKind(
        micro_batches=number,
        updates=updates,
        clip=clip and updates != "spread",
        outputs="release",
        reports_norm=reports and updates in ("overlap", "serial") and not clip,
    ),
    st.integers(1, 2),
    st.sampled_from(["none", "overlap", "serial", "deferred", "spread"]),
    st.booleans(),
    st.booleans(),
)


@given(
    chains(2) | workloads().filter(lambda works: len(works.blocks) <= 2), st.integers(0, 110), MACHINES | SHARED, STEPS
)
@draws(16)
def test_no_choice_at_all_is_faster(works: Workload, part: int, machine: Hardware, kind: StepKind):
    step: dict[str, Any] = {"micro_batches": kind.micro_batches, "outputs": "release"}
    between = memories(works, step)
    memory = None if part > 100 or not between else between[len(between) * part // 101]
    best = fastest_of_all(works, kind, memory, machine)
    assume(best is not None)
    assert best is not None
    table = build(works, kind)
    bound = step_bound(table.effects(), memory, machine)
    assert bound.seconds <= best * (1 + 1e-9)
    assert bound == step_bound(table.effects(), memory, machine)


@given(step_schedules(), MACHINES | SHARED)
@draws(100, usual=12)
def test_no_schedule_is_faster_than_its_bound_in_the_memory_that_it_takes(plan: Any, machine: Hardware):
    assume(plan.kind.mode == "train")
    step_s = plan.simulate(machine).step_s
    bounds = [step_bound(plan.effects(), memory, machine).seconds for memory in (plan.device_bytes, None)]
    assert step_s * (1 + 1e-9) >= bounds[0] >= bounds[1] * (1 - 1e-9)


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (Hardware(1e12, 1e12, 1e6), "compute"),
        (Hardware(1e6, 1e12, 1e12), "copies to the device"),
        (Hardware(1e12, 1e6, 1e12), "gradients to the host"),
        (Hardware(1e12, 1e12, 1e12, 0.0, 1e6), "host memory"),
    ],
)
def test_the_plan_of_a_step_with_one_slow_part_is_at_the_bound(machine: Hardware, reason: str):
    works = with_updates(chain([2**20] * 8))
    options: dict[str, Any] = {"memory": 100 << 20, "updates": "overlap", "outputs": "release"}
    plan = schedule(works, **options, hardware=machine)
    bound = step_bound(plan.effects(), 100 << 20, machine)
    assert reason in bound.reason
    assert bound.above(plan.simulate(machine).step_s) < 0.001
