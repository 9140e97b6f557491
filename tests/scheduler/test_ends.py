"""The ends of a step: what nothing computes beside, in any order of its ops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.build import build
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload
from tests.scheduler.workloads import LAYER, chain, with_updates

MACHINE = Hardware(1e9, 1e9, 4e10, host_bytes_per_s=3.5e9)


def with_embedding() -> Workload:
    return with_updates(chain([50 * LAYER, *[LAYER] * 4]))


def step(updates: str, *, clip: bool = False) -> Schedule:
    return build(with_embedding(), StepKind(updates=updates, clip=clip, outputs="release"))


def ends_s(plan: Schedule) -> float:
    bounds = plan.lower_bounds(MACHINE)
    return bounds["ends"] - bounds["compute"]


def seconds(plan: Schedule, what: str, block: int = 0) -> float:
    """Of the op of one kind and block; of a `W`, the first time that it runs."""
    durations = [timing.end_s - timing.start_s for timing in plan.simulate(MACHINE).timeline]
    ops = (op for _, op in plan.positions())
    found = [s for s, op in zip(durations, ops, strict=True) if (op.what, op.block) == (what, block)]
    return sum(found) if what != "W" else found[0]


def test_where_updates_overlap_weights_come_before_and_gradients_leave_after():
    plan = step("overlap")
    assert ends_s(plan) == pytest.approx(sum(seconds(plan, what) for what in "WGU"))
    assert plan.lower_bounds(MACHINE)["ends"] <= plan.simulate(MACHINE).step_s


def test_a_deferred_update_comes_before_the_copy_of_its_weights():
    plan = step("deferred")
    assert ends_s(plan) == pytest.approx(sum(seconds(plan, what) for what in "UWG"))


def test_a_norm_comes_after_the_last_gradients():
    plan = step("deferred", clip=True)
    assert ends_s(plan) == pytest.approx(sum(seconds(plan, what) for what in "UWGS"), rel=1e-6)


def test_serial_updates_all_come_after_compute():
    plan = step("serial")
    updates = sum(seconds(plan, "U", block) for block in range(5))
    assert ends_s(plan) == pytest.approx(seconds(plan, "W") + seconds(plan, "G") + updates)


def test_the_ends_of_a_forward_are_its_first_weights():
    plan = build(with_embedding(), StepKind(mode="forward"))
    assert ends_s(plan) == pytest.approx(seconds(plan, "W"))


@pytest.mark.parametrize(
    ("updates", "clip"), [("spread", False), ("overlap", False), ("deferred", True), ("serial", False)]
)
def test_a_step_that_compute_holds_up_takes_no_longer_than_its_chain(updates: str, clip: bool):
    """A model of 28 layers between an embedding and a head of five each, whose ends are a twentieth of the step."""
    workload = with_updates(chain([400 * LAYER, *[80 * LAYER] * 28, 400 * LAYER]))
    kind = StepKind(updates=updates, clip=clip, micro_batches=8, outputs="release")
    plan = build(workload, kind, memory=1 << 31)
    machine = replace(MACHINE, flops_per_s=2e8)
    bounds, taken = plan.lower_bounds(machine), plan.simulate(machine).step_s
    assert bounds["ends"] > 1.03 * bounds["compute"]
    assert taken == pytest.approx(bounds["ends"], rel=1e-3)


def test_deferred_updates_all_come_before_the_backward():
    """The host takes longer than the forward: the last weights wait for all updates, and the backward for these."""
    workload = with_updates(chain([LAYER] * 8))
    plan = build(workload, StepKind(updates="deferred", clip=True, micro_batches=2, outputs="release"))
    host, flops = MACHINE.host_bytes_per_s, MACHINE.flops_per_s
    assert isinstance(host, float)
    assert isinstance(flops, float)
    machine = replace(MACHINE, host_bytes_per_s=host / 30, flops_per_s=flops / 30)
    bounds, taken = plan.lower_bounds(machine), plan.simulate(machine).step_s
    assert max(seconds for reason, seconds in bounds.items() if reason != "behind") < 0.9 * bounds["behind"]
    assert taken == pytest.approx(bounds["behind"], rel=0.02)
    assert bounds["behind"] <= taken * (1 + 1e-9)
