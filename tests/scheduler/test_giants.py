"""Weights that are much larger than most: alone on the device where two slots for them are too many."""

from __future__ import annotations

import pytest
from hypothesis import given

from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.draft import Builder, Choices
from megatrain.scheduler.builder.stays import giants
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.schedule import schedule_of
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.symbolic import find_harm
from tests.scheduler.workloads import LAYER, chain, with_updates, workloads

EVEN = Hardware(1e9, 1e9, 1e10, host_bytes_per_s=1e11)


def lopsided() -> Workload:
    """An embedding and a head that are four times as large as each of eight layers between them."""
    return with_updates(chain([4 * LAYER, *[LAYER] * 8, 4 * LAYER]))


def least(workload: Workload, num_slots: int, micro_batches: int = 1) -> int:
    """The bytes of the plan that takes least with so many slots."""
    options = {"activations": "offload", "updates": "spread", "outputs": "release", "micro_batches": micro_batches}
    return schedule(workload, num_slots=num_slots, **options).device_bytes


def test_giants_are_larger_than_two_usual_blocks():
    assert giants(lopsided()) == (0, 9)
    assert giants(chain([2 * LAYER, LAYER, LAYER])) == ()
    assert giants(chain([0, 0, 0, LAYER, 3 * LAYER, LAYER, 0])) == (4,)
    assert giants(chain([0, 0])) == ()


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_small_blocks_take_turns_in_two_slots_where_a_giant_has_the_room_of_one(micro_batches: int):
    workload = lopsided()
    two, one = least(workload, 2, micro_batches), least(workload, 1, micro_batches)
    assert one + LAYER // 2 < two
    options = {"updates": "spread", "outputs": "release", "micro_batches": micro_batches}
    found = schedule(workload, memory=(one + two) // 2, **options)
    assert found.device_bytes <= (one + two) // 2
    assert found.num_slots > 1
    alone = schedule(workload, num_slots=1, memory=(one + two) // 2, **options)
    assert found.simulate(EVEN).step_s < 0.9 * alone.simulate(EVEN).step_s
    ticks = {str(op): position.tick for position, op in found.positions()}
    last = max(tick for op, tick in ticks.items() if op.startswith("F0"))
    assert all(tick > last for op, tick in ticks.items() if op.startswith("W1@"))  # nothing comes beside the embedding
    found.check()
    find_harm(found, workload)


def test_with_room_for_two_slots_everything_comes_ahead():
    workload = lopsided()
    roomy = schedule(workload, memory=least(workload, 2), updates="spread", outputs="release")
    ticks = {str(op): position.tick for position, op in reversed(list(roomy.positions()))}
    assert min(tick for op, tick in ticks.items() if op.startswith("W1@")) <= ticks["F0"]


@given(workloads())
@draws(100)
def test_no_weights_share_the_device_with_a_giant(workload: Workload):
    builder = Builder(workload, StepKind(updates="overlap", outputs="release"))
    blocks = workload.backward_blocks()
    plan = schedule_of(builder.table(Choices(2, len(workload.blocks), blocks[-1:], has_giants_alone=True)))
    plan.check()
    loads = [(p.tick, op.block) for p, op in plan.positions() if op.what == "W"]
    uses = [(p.tick, op.block) for p, op in plan.positions() if op.what in "FB"]
    for begin, block in loads:
        if block in giants(workload):
            following = min((tick for tick, other in loads if other == block and tick > begin), default=len(plan.ticks))
            end = max((tick for tick, user in uses if user == block and begin < tick < following), default=begin)
            assert not [other for tick, other in loads if begin < tick <= end and other != block]
            earlier = [(tick, user) for tick, user in uses if user != block and tick > begin]
            assert not [user for tick, user in earlier if tick < end and workload.blocks[user].state_bytes > 0]
