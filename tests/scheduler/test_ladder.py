"""What memory goes to: weights that stay lie between others, in an order that depends on no budget."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from megatrain.errors import ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.machine import usual_machine
from megatrain.scheduler.builder.build import build
from megatrain.scheduler.builder.draft import Builder, Choices
from megatrain.scheduler.builder.search import Family, Freedom
from megatrain.scheduler.builder.stays import by_benefit
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.schedule import Schedule, schedule_of
from megatrain.scheduler.simulate import simulate
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.workloads import LAYER, chain, step_schedules, with_updates, workloads

FREE = Freedom(keep=True, saves=True, stays=True, parks=True)
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


def test_copies_run_beside_the_compute_of_blocks_that_stay():
    """Half of the blocks stay. Between the others they hide copies; behind the others they hide none."""
    builder = Builder(frozen(16), STEP)
    machine = Hardware(1e8, 1e8, 5e9)

    def seconds(stay: range) -> float:
        return simulate(builder.table(Choices(2, 16, (15,), persistent=tuple(stay))), machine).step_s

    assert seconds(range(0, 16, 2)) < 0.85 * seconds(range(8, 16))


@given(step_schedules())
@draws(60)
def test_weights_come_in_the_order_in_which_they_are_needed(plan: Schedule):
    assume(plan.kind.updates not in ("deferred", "spread"))  # there the host decides what can come first
    readers: dict[int, int] = {}
    ops = dict(plan.positions())
    for position, load in plan.bindings().items():
        readers[load.tick] = min(position.tick, readers.get(load.tick, position.tick))
    assert all(ops[position].what in "FB" for position in plan.bindings())
    assert [readers[tick] for tick in sorted(readers)] == sorted(readers.values())


def test_a_block_that_is_copied_far_ahead_lets_pass_what_is_needed_sooner():
    """Its slot is free from the second forward on, that of a resident block a stage before."""
    builder = Builder(frozen(12), STEP)
    stay = tuple(block for block in range(12) if block not in (0, 4, 8))
    table = builder.table(Choices(2, 12, (11,), resident=stay))
    assert [op.block for op in table.ops if op.what == "W"] == [*range(12), 0]


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


def test_a_block_is_copied_again_once_its_forward_is_over():
    """Three slots, of which one stays at the turn: a slot is free while the block's forward still runs."""
    works = chain([8 * LAYER, LAYER, LAYER])
    frozen_first = replace(works, blocks=(replace(works.blocks[0], has_backward=False), *works.blocks[1:]))
    builder = Builder(frozen_first, replace(STEP, updates="none", micro_batches=3))
    plan = schedule_of(builder.table(Choices(3, 3, (2,), has_giants_alone=True)))
    loads = [position for position, op in plan.positions() if str(op).startswith("W1@")]
    over = max(position.tick for position, op in plan.positions() if (op.what, op.block) == ("F", 1))
    assert len(loads) == 2
    assert loads[1].tick > over


def test_what_is_too_large_keeps_nothing_else_out():
    works = frozen(8)
    large = replace(works, blocks=tuple(replace(block, saved_bytes=10 * LAYER) for block in works.blocks))
    least = schedule(large, updates="overlap", outputs="release", num_slots=2).device_bytes
    plan = schedule(large, updates="overlap", outputs="release", memory=least + 5 * LAYER)
    assert plan.saves == (7,)
    assert len(plan.persistent) >= 4


def test_an_embedding_and_a_head_share_a_slot_while_layers_stay():
    works = with_updates(chain([4 * LAYER, *[LAYER] * 8, 4 * LAYER]))
    least = schedule(works, updates="overlap", outputs="release", activations="keep", num_slots=2).device_bytes
    plans = [schedule(works, updates="overlap", outputs="release", memory=least + n * LAYER) for n in range(16)]
    counts = [len(plan.resident()) for plan in plans]
    assert counts == sorted(counts)
    assert counts[-1] == 10
    assert next(plan for plan in plans if 0 in plan.resident()).resident() == tuple(range(10))


def test_a_second_ladder_keeps_the_weights_of_the_first_two_blocks_first():
    builder = Builder(frozen(8), STEP)
    family = Family.of(builder, Choices(2, 0, (7,)), FREE, Hardware(1e9, 1e9, 1e12))

    def persistent(found: Family) -> list[int]:
        return [use.number for use in found.stays if use.choice == "persistent"]

    assert persistent(family) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert persistent(family.first_blocks_first()) == [0, 1, 4, 2, 6, 5, 3, 7]
    assert sorted(family.first_blocks_first().stays) == sorted(family.stays)


def test_the_ladder_takes_turns_so_that_both_streams_get_shorter():
    builder = Builder(frozen(8), STEP)
    start = Choices(2, 0, (7,))
    for machine, first in ((Hardware(1e9, 1e9, 1e12), "persistent"), (Hardware(1e12, 1e12, 1e6), "saves")):
        family = Family.of(builder, start, FREE, machine)
        uses = list(family.ladder())
        assert uses[0].choice == first
        assert sorted(use.number for use in uses if use.choice == "saves") == list(range(7))
        assert sorted(use.number for use in uses if use.choice == "persistent") == list(range(8))
        assert family.plan(uses) == family.everything
    # At each rung the next use is of the stream that is the longer one by then.
    machine = Hardware(1e9, 1e9, 2e10)
    family = Family.of(builder, start, FREE, machine)
    compute, copies = family.compute_s, family.copies_s
    kinds: set[bool] = set()
    for use in family.ladder():
        is_graph = use.choice == "saves"
        kinds.add(is_graph)
        rest = [other for other in family.ladder() if (other.choice == "saves") == is_graph]
        assert is_graph == (compute >= copies) or len(rest) < len([*family.graphs, *family.stays])
        compute, copies = compute - use.seconds * is_graph, copies - use.seconds * (not is_graph)
    assert kinds == {True, False}


def test_a_plan_by_time_is_never_slower_than_the_one_that_parks_as_little_as_it_can():
    """Where nothing needs to be parked, plans that could park miss it here."""
    works = frozen(16)
    works = replace(works, blocks=tuple(replace(block, saved_bytes=LAYER // 4) for block in works.blocks))
    machine, memory = Hardware(3e7, 3e7, 1e9), 17 * LAYER // 2
    frugal = build(works, STEP, memory=memory, usual=machine)
    found = build(works, STEP, memory=memory, hardware=machine)
    assert found.simulate(machine).step_s <= frugal.simulate(machine).step_s


def test_another_budget_climbs_the_same_ladder():
    """What a smaller budget holds, a larger one holds as well, while the slots are as many."""
    works = frozen(12)
    budgets = range(600_000, 3_000_000, 100_000)
    plans = [schedule(works, memory=memory, updates="overlap", outputs="release") for memory in budgets]
    for less, more in pairwise(plans):
        assert set(less.persistent) <= set(more.persistent)
        assert set(less.saves) <= set(more.saves)
        assert more.simulate(usual_machine()).step_s <= less.simulate(usual_machine()).step_s * (1 + 1e-9)
    assert len({plan.persistent for plan in plans}) > 5
