"""What memory goes to: weights that stay lie between others, in an order that depends on no budget."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from megatrain.errors import ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.build import build
from megatrain.scheduler.builder.stays import by_benefit
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.workloads import LAYER, chain, step_schedules, workloads

STEP = StepKind(updates="overlap", outputs="release")


def frozen(count: int) -> Workload:
    """Layers of which an eighth is trained."""
    works = chain([LAYER] * count)
    part = LAYER // 8
    blocks = [
        replace(block, gradient_bytes=part, update_bytes=7 * part, frozen_bytes=block.state_bytes - part)
        for block in works.blocks
    ]
    return replace(works, blocks=tuple(blocks))


def test_each_beginning_of_the_order_is_spread_over_the_model():
    order = sorted(range(32), key=lambda block: by_benefit(block, LAYER))
    for count in (2, 4, 8, 16):
        assert {after - before for before, after in pairwise(sorted(order[:count]))} == {32 // count}
    assert sorted(range(4), key=lambda block: by_benefit(block, [1, 5, 1, 9][block])) == [3, 1, 0, 2]


@given(step_schedules())
@draws(60)
def test_weights_come_in_the_order_in_which_they_are_needed(plan: Schedule):
    assume(plan.kind.updates not in ("deferred", "spread"))  # there the host decides what can come first
    readers: dict[int, int] = {}
    ops = dict(plan.positions())
    for position, load in plan.bindings().items():
        readers[load.tick] = min(position.tick, readers.get(load.tick, position.tick))
    assert all(ops[position].what in "FBU" for position in plan.bindings())
    assert [readers[tick] for tick in sorted(readers)] == sorted(readers.values())


@given(workloads(), st.integers(1, 3000), st.integers(1, 2))
@draws(100, usual=10)
def test_without_a_machine_as_little_is_parked_as_without_anything_else(
    works: Workload, memory: int, micro_batches: int
):
    """Parked activations take host memory as well, which nobody has given."""
    options: dict[str, Any] = {"memory": memory, "micro_batches": micro_batches, "outputs": "release"}
    try:
        plan = schedule(works, **options)
        least = schedule(works, **options, num_slots=min(2, max(1, plan.num_slots)), activations="recompute")
    except ScheduleError:
        assume(False)
        raise
    assert plan.park_bytes <= least.park_bytes


def test_a_plan_by_time_is_never_slower_than_the_one_that_parks_as_little_as_it_can():
    """Where nothing needs to be parked, plans that could park miss it here."""
    works = frozen(16)
    works = replace(works, blocks=tuple(replace(block, saved_bytes=LAYER // 4) for block in works.blocks))
    machine, memory = Hardware(3e7, 3e7, 1e9), 17 * LAYER // 2
    frugal = build(works, STEP, memory=memory, usual=machine)
    found = build(works, STEP, memory=memory, hardware=machine)
    assert found.simulate(machine).step_s <= frugal.simulate(machine).step_s
