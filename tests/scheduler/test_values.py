"""Values of other kinds: results that blocks keep for their own backward, and tensors on the host."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from megatrain.errors import ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.work import products
from megatrain.scheduler.builder.draft import Builder, Choices
from megatrain.scheduler.builder.search import sparing_results
from megatrain.scheduler.from_program import merge, schedule
from megatrain.scheduler.lifetimes import find_peak
from megatrain.scheduler.schedule import Schedule, schedule_of
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import KeptWork, ValueWork, Workload
from tests.scheduler.symbolic import find_harm
from tests.scheduler.workloads import ACT, LAYER, chain, with_results, with_updates

COUNT, FLOPS = 6, 10**6


# A copy of a result takes 8 us; its recompute takes 9 us on the first machine, 4.5 us on the second.
NBYTES, SPARED = 2 * ACT, 9 * FLOPS // 10


SLOW, FAST, NARROW = Hardware(2e9, 2e9, 1e11), Hardware(2e9, 2e9, 2e11), Hardware(1e8, 1e8, 1e11)


STEP: dict[str, Any] = {"updates": "overlap", "outputs": "release"}


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


def planned(workload: Workload, memory: int, machine: Hardware | None, **options: Any) -> Schedule:
    found = schedule(workload, memory=memory, hardware=machine, **(STEP | options))
    found.check()
    assert found.instructions is not None
    return found


def least(workload: Workload) -> int:
    return schedule(workload, activations="offload", num_slots=1, **STEP).device_bytes


def results_of(plan: Schedule) -> list[int]:
    return [v for vs in plan.parked().values() for v in vs if plan.known_workload().values[v].is_result]


def without_kept(workload: Workload) -> Workload:
    """The same blocks, which may keep nothing."""
    blocks = tuple(replace(block, kept=None) for block in workload.blocks)
    values = tuple(value for value in workload.values if not value.is_result)
    return Workload(blocks, values, workload.storages[: len(values)], workload.loss_bytes)


def test_results_are_kept_and_parked_where_their_recompute_takes_longer_than_their_copies():
    workload = keepers()
    memory = least(workload) + 2 * NBYTES
    plan = planned(workload, memory, SLOW)
    assert set(plan.results) >= {0, 1, 2}
    assert results_of(plan)
    without = schedule(without_kept(workload), memory=memory, hardware=SLOW, **STEP)
    assert plan.simulate(SLOW).step_s < without.simulate(SLOW).step_s
    find_harm(plan, workload)
    assert sparing_results(workload, FAST) == tuple(range(COUNT - 1))
    assert results_of(planned(workload, memory, NARROW)) == []


def test_results_are_printed_read_back_and_refused_where_a_block_has_none():
    workload = keepers()
    plan = planned(workload, least(workload) + 2 * NBYTES, SLOW)
    assert "\nresults: 0-" in str(plan)
    assert Schedule.parse(str(plan), workload) == plan
    assert Workload.from_dict(workload.to_dict()) == workload
    assert "; keeps its results" in str(plan.instructions)
    assert "results kept: " in plan.diff(replace(plan, results=()))
    refused = r"results of blocks \[.*\] can't be kept"
    for results in ((COUNT - 1,), (1, 0), (0, 0)):
        with pytest.raises(ScheduleError, match=refused):
            replace(plan, results=results).check()
    with pytest.raises(ScheduleError, match=refused):
        plan.check(without_kept(workload))
    *others, last = workload.values
    changes: list[dict[str, Any]] = [
        {"readers": (3,)},
        {"producer": None, "is_parkable": False},
        {"is_output": True, "is_parkable": False},
        {"has_gradient": True},
    ]
    for change in changes:
        with pytest.raises(ScheduleError, match="isn't a result that a block keeps"):
            replace(workload, values=(*others, replace(last, **change))).check()


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


LENGTHS = ValueWork("lengths", 40, 4, 0, (1, 2), False, False, False, on_host=True)


def with_host_value(*, has_gradient: bool = False) -> Workload:
    """Three layers, the first of which makes a tensor of the CPU that the others read."""
    work = chain([LAYER] * 3)
    return replace(
        work, values=(*work.values, replace(LENGTHS, has_gradient=has_gradient)), storages=(*work.storages, 48)
    )


def test_the_device_holds_nothing_of_values_on_the_host_and_the_host_all_with_their_gradients():
    work, plain = with_host_value(), schedule(chain([LAYER] * 3), activations="offload")
    found = schedule(work, activations="offload")
    assert str(found).replace(f"host: {found.host_bytes} B", f"host: {plain.host_bytes} B") == str(plain)
    assert (found.host_value_bytes, found.host_bytes) == (48, plain.host_bytes + 48)
    assert find_peak(found) == find_peak(plain)
    found.check()
    differentiated = with_host_value(has_gradient=True)
    assert schedule(differentiated, mode="forward").host_value_bytes == 48
    assert schedule(differentiated, micro_batches=3, updates="overlap").host_value_bytes == 3 * (48 + 40)
    aliases = replace(work, values=(*work.values, replace(LENGTHS, name="view", nbytes=8, readers=(2,))))
    assert schedule(aliases).host_value_bytes == 48
    assert Workload.from_dict(json.loads(json.dumps(work.to_dict()))) == work


def test_a_wrong_place_or_figure_of_values_on_the_host_is_refused():
    work = with_host_value()
    value = replace(LENGTHS, name="x", on_host=False)
    with pytest.raises(ScheduleError, match=r"^value x shares storage 4 with a value on the host"):
        schedule(replace(work, values=(*work.values, value)))
    there = replace(work, values=tuple(replace(v, on_host=False) for v in work.values))
    for built, other in ((work, there), (there, work)):
        with pytest.raises(ScheduleError, match="live bytes, but"):
            schedule(built).check(other)
    assert len(merge([work, there]).workload.values) == len(work.values) + 1  # micro-batches of both kinds share none
    found = schedule(work)
    with pytest.raises(ScheduleError, match=f"host_bytes is stated as {found.host_bytes - 48}"):
        replace(found, host_bytes=found.host_bytes - 48).check()
