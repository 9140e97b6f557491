"""The bound of a step's seconds: no plan is faster, and some plans are nearly as fast."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatrain.errors import ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.bound import Tradeoff, least_seconds, step_bound
from megatrain.scheduler.builder.build import build
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.every_plan import fastest_of_all
from tests.scheduler.test_search import MACHINES, chains, memories
from tests.scheduler.test_times import SHARED
from tests.scheduler.workloads import Options, chain, step_schedules, with_updates, workloads

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


def test_a_norm_that_is_reported_without_an_update_waits_for_nothing():
    works, machine = chain([64]), Hardware(100.0, 100.0, 100.0, 0.001, 100.0)
    works = replace(works, blocks=tuple(replace(block, update_bytes=0) for block in works.blocks))
    plan = build(works, StepKind(updates="overlap", outputs="release", reports_norm=True))
    assert "N" in {op.what for op in plan.ops}
    assert step_bound(plan.effects(), None, machine).seconds <= plan.simulate(machine).step_s * (1 + 1e-9)


def test_more_memory_lowers_the_bound_from_recomputation_to_compute_alone():
    works = with_updates(chain([2**20] * 16))
    machine = Hardware(1e9, 1e9, 1e9)
    kind = StepKind(updates="overlap", outputs="release")
    effects = build(works, kind).effects()
    bounds = [step_bound(effects, memory << 12, machine).seconds for memory in (520, 530, 540, 550, 560, 600, 5000)]
    assert bounds == sorted(bounds, reverse=True)
    assert len(set(bounds)) > 4
    assert step_bound(effects, 5000 << 12, machine).seconds == step_bound(effects, None, machine).seconds


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


def test_uses_of_memory_are_taken_in_parts():
    compute = Tradeoff(10.0, "compute", [(4.0, 8), (2.0, 2), (1.0, 0)])
    assert (compute.seconds, compute.least) == (9.0, 3.0)
    assert [compute.nbytes(seconds) for seconds in (9.0, 8.0, 7.0, 5.0, 3.0)] == [0, 1, 2, 6, 10]
    copies = Tradeoff(8.0, "copies", [(8.0, 8)])
    found, reason = least_seconds([compute], [copies], 5)
    # 7 seconds need 2 bytes and 1 byte; from there on each second needs 2 bytes and 1 byte more.
    assert found == pytest.approx(7 - 2 / 3)
    assert reason == "compute and copies, in this memory"
    assert least_seconds([compute], [copies], 100) == (3.0, "compute")


def test_a_step_without_a_backward_or_an_update_has_a_bound():
    options = Options(num_slots=2, keep=None, activations="auto", transfer="bind", mode="train", outputs="release")
    plan = options.build(chain([64, 64]))
    machine = Hardware(1e3, 1e3, 1e6)
    assert 0 < step_bound(plan.effects(), 10**6, machine).seconds <= plan.simulate(machine).step_s


def test_a_memory_that_is_too_small_for_any_plan_gives_the_bound_of_no_memory_at_all():
    works, machine = chain([2**20] * 4), Hardware(1e6, 1e6, 1e6)
    with pytest.raises(ScheduleError):
        schedule(works, memory=1, outputs="release")
    effects = build(works, StepKind(outputs="release")).effects()
    assert step_bound(effects, 1, machine).seconds >= step_bound(effects, None, machine).seconds
