"""Results that blocks keep for their own backward: kept where that pays, and counted like other values."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product

import pytest

from megatrain.errors import ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.work import products
from megatrain.scheduler.builder.draft import Builder, Choices
from megatrain.scheduler.builder.results import sparing_results
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.merging import merge
from megatrain.scheduler.schedule import Schedule, schedule_of
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import KeptWork, ValueWork, Workload
from tests.scheduler.symbolic import find_harm
from tests.scheduler.workloads import ACT, LAYER, chain, with_results, with_updates

COUNT, FLOPS = 6, 10**6
# A copy of a result takes 8 us; its recompute takes 9 us on the first machine, 4.5 us on the second.
NBYTES, SPARED = 2 * ACT, 9 * FLOPS // 10
SLOW, FAST, NARROW = Hardware(2e9, 2e9, 1e11), Hardware(2e9, 2e9, 2e11), Hardware(1e8, 1e8, 1e11)
STEP = {"updates": "overlap", "outputs": "release"}


def keepers(*, nbytes: int = NBYTES, count: int = COUNT) -> Workload:
    """Layers that may keep results; of the FLOPs of each forward most are spared then."""
    found = with_updates(chain([LAYER] * count))
    sizes = {"state_bytes": 64, "gradient_bytes": 64, "update_bytes": 64, "saved_bytes": 8 * ACT}
    works = [replace(block, backward_workspace_bytes=9 * ACT, **sizes) for block in found.blocks]
    found = replace(found, blocks=tuple(works))
    for index in range(count):
        kept = KeptWork(ACT, 9 * ACT - nbytes // 2, products(FLOPS - SPARED))
        found = with_results(found, index, kept, [nbytes - 64, 64])
    return found


def planned(workload: Workload, memory: int, machine: Hardware | None, **options: object) -> Schedule:
    found = schedule(workload, memory=memory, hardware=machine, **{**STEP, **options})  # type: ignore[arg-type]
    found.check()
    assert found.instructions is not None
    return found


def least(workload: Workload) -> int:
    return schedule(workload, activations="offload", num_slots=1, **STEP).device_bytes  # type: ignore[arg-type]


@functools.cache
def parking() -> Schedule:
    """A plan of `keepers()` with results, of which some are parked."""
    return planned(keepers(), least(keepers()) + 2 * NBYTES, SLOW)


def results_of(plan: Schedule) -> list[int]:
    return [v for vs in plan.parked().values() for v in vs if plan.known_workload().values[v].is_result]


def test_results_are_parked_where_their_recompute_takes_longer_than_their_copies():
    workload, plan = keepers(), parking()
    assert set(plan.results) >= {0, 1, 2}
    assert results_of(plan)
    without = schedule(without_kept(workload), memory=least(workload) + 2 * NBYTES, hardware=SLOW, **STEP)  # type: ignore[arg-type]
    assert plan.simulate(SLOW).step_s < without.simulate(SLOW).step_s
    find_harm(plan, workload)


def test_no_result_is_kept_where_its_copies_take_longer():
    workload = keepers()
    assert sparing_results(workload, FAST) == tuple(range(COUNT - 1))
    plan = planned(workload, least(workload) + 2 * NBYTES, NARROW)
    assert results_of(plan) == []


@pytest.mark.parametrize("activations", ["recompute", "keep", "offload"])
def test_an_option_that_says_what_is_kept_is_taken_at_its_word(activations: str):
    workload = keepers()
    memory = schedule(workload, activations=activations, **STEP).device_bytes  # type: ignore[arg-type]
    assert planned(workload, memory, SLOW, activations=activations).results == ()


def test_graphs_replace_results_where_memory_is_ample():
    workload = keepers()
    everything = schedule(workload, activations="keep", **STEP)  # type: ignore[arg-type]
    plan = planned(workload, everything.device_bytes + 10 * LAYER, SLOW)
    assert plan.saves == tuple(range(COUNT))
    assert plan.results == ()


def test_without_a_machine_results_are_kept_on_the_device_alone():
    """On the host they would take memory of which nobody knows whether it is there."""
    workload = keepers()
    blocks = [
        replace(block, forward=products(10**11), kept=replace(block.kept, repeated=products(10**10)))
        for block in workload.blocks
        if block.kept is not None
    ]
    workload = replace(workload, blocks=tuple(blocks))
    frugal = schedule(workload, activations="recompute", **STEP)  # type: ignore[arg-type]
    plan = planned(workload, frugal.device_bytes + 2 * NBYTES, None)
    assert plan.results
    assert plan.parked() == {}
    scarce = planned(workload, least(workload) + NBYTES // 4, None)
    assert scarce.parked() != {}
    assert results_of(scarce) == []


def test_weights_in_place_keep_results_that_fit():
    workload = keepers()
    frugal = schedule(workload, transfer="bind", activations="recompute", **STEP)  # type: ignore[arg-type]
    plan = planned(workload, frugal.device_bytes + NBYTES, SLOW, transfer="bind")
    assert plan.results
    assert plan.parked() == {}
    find_harm(plan, workload)


def test_the_text_of_a_schedule_names_blocks_that_keep_results_and_parses_back():
    workload, plan = keepers(), parking()
    assert "\nresults: 0-" in str(plan)
    assert Schedule.parse(str(plan), workload) == plan
    assert Workload.from_dict(workload.to_dict()) == workload
    assert "; keeps its results" in str(plan.instructions)
    assert "results kept: " in plan.diff(replace(plan, results=()))


def test_results_of_a_block_that_has_none_or_retains_its_graph_are_refused():
    workload, plan = keepers(), parking()
    for results in ((COUNT - 1,), (1, 0), (0, 0)):
        with pytest.raises(ScheduleError, match=r"results of blocks \[.*\] can't be kept"):
            replace(plan, results=results).check()
    with pytest.raises(ScheduleError, match=r"results of blocks \[.*\] can't be kept"):
        plan.check(without_kept(workload))


@pytest.mark.parametrize(("change", "message"), [
    ({"readers": (3,)}, "isn't a result that a block keeps"),
    ({"producer": None, "is_parkable": False}, "isn't a result that a block keeps"),
    ({"is_output": True, "is_parkable": False}, "isn't a result that a block keeps"),
    ({"has_gradient": True}, "isn't a result that a block keeps"),
])  # fmt: skip
def test_a_value_that_is_no_result_is_refused(change: dict[str, object], message: str):
    workload = keepers()
    *others, last = workload.values
    bad: ValueWork = replace(last, **change)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=message):
        replace(workload, values=(*others, bad)).check()


@pytest.mark.parametrize(("num_slots", "micro_batches"), [(2, 1), (3, 2), (5, 3)])
def test_results_return_after_they_have_left_however_soon_that_is(num_slots: int, micro_batches: int):
    """Other parked values are made a block earlier, so they have always left by then."""
    for count, keep in product((2, 3, 4), (0, 1)):
        builder = Builder(keepers(count=count), StepKind(micro_batches=micro_batches, outputs="release"))
        saves = () if micro_batches > 1 else (count - 1,)
        results = tuple(block for block in range(count) if block not in saves)
        plan = schedule_of(builder.table(Choices(num_slots, keep, saves, results=results)))
        plan.check()
        find_harm(plan, builder.workload, runs=3)


def without_kept(workload: Workload) -> Workload:
    """The same blocks, which may keep nothing."""
    blocks = tuple(replace(block, kept=None) for block in workload.blocks)
    values = tuple(value for value in workload.values if not value.is_result)
    return Workload(blocks, values, workload.storages[: len(values)], workload.loss_bytes)


def test_a_micro_batch_without_results_counts_as_one_that_recomputes():
    """A short text's attention isn't worth keeping: of its block the larger figures count."""
    with_kept, without = keepers(), without_kept(keepers())
    merged = merge([with_kept, without]).workload
    kept, plain = merged.blocks[0].kept, without.blocks[0]
    assert kept is not None
    assert kept.repeated == plain.forward
    assert kept.backward_workspace_bytes == plain.backward_workspace_bytes
    assert sum(value.is_result for value in merged.values) == 2 * COUNT
    assert merge([without, with_kept]).workload.blocks == merged.blocks
