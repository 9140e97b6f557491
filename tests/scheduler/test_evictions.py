"""E and L in schedules: parked values go on to a file and come back, through buffers that nothing overwrites."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import ScheduleError
from megatrain.scheduler.builder.build import build
from megatrain.scheduler.builder.evictions import with_evictions
from megatrain.scheduler.builder.moments import with_moments
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule, schedule_of
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.mutations import mutants, with_figures
from tests.scheduler.symbolic import Harm, find_harm
from tests.scheduler.test_instructions import is_rejected as is_refused
from tests.scheduler.test_instructions import mutants as other_instructions
from tests.scheduler.test_moments import filed
from tests.scheduler.workloads import Options, assert_checked_and_read_back, trained, whole_steps, workloads

SMALL = trained(4)


def parking(most: int | None = 0, *, micro_batches: int = 2, updates: str = "overlap") -> Schedule:
    """Parks inputs of all blocks but the last, each of 8192 bytes."""
    kind = StepKind(updates=updates, outputs="release", micro_batches=micro_batches)
    return schedule_of(with_evictions(build(SMALL, kind, num_slots=2, activations="offload"), most))


def disk(plan: Schedule) -> list[str]:
    return [str(op) for op in plan.ops if op.stream == Stream.DISK]


@given(workloads(), whole_steps(), st.integers(0, 4), st.sampled_from([0, 5]), st.integers(0, 2**20))
@draws(80, usual=20)
def test_any_part_of_what_is_parked_may_be_in_a_file_whatever_runs_first(
    workload: Workload, chosen: Options, quarters: int, moments: int, seed: int
):
    workload = filed(workload, [moments] * 7)
    before = schedule_of(with_moments(chosen.build(workload)))
    most = before.park_bytes * quarters // 4
    found = schedule_of(with_evictions(before, most))
    for stream in (Stream.H2D, Stream.COMPUTE, Stream.D2H, Stream.HOST):
        mine, theirs = ([str(op) for op in each.ops if op.stream == stream] for each in (found, before))
        assert mine == theirs
    assert [op for op in disk(found) if op[0] in "RK"] == disk(before)
    for what in "EL":
        moved = [op.block for op in found.ops if op.stream == Stream.DISK and op.what == what]
        assert sorted(moved) == sorted([*found.evicted] * found.kind.micro_batches)
    assert found.park_bytes <= before.park_bytes
    assert (found == before) == (not found.evicted)
    assert before.host_bytes - found.host_bytes == before.park_bytes - found.park_bytes
    assert found.device_bytes == before.device_bytes
    assert_checked_and_read_back(found, workload)
    find_harm(found, workload, seed=seed, runs=6)


@given(
    st.integers(0, 3).map(lambda count: count * 3 * 8192),
    st.integers(1, 3),
    st.sampled_from(["overlap", "spread", "deferred"]),
    st.integers(0, 2**20),
    st.booleans(),
)
@draws(20, usual=3)
def test_every_other_table_is_refused_or_harmless_and_all_other_instructions_are_refused(
    most: int, micro_batches: int, updates: str, seed: int, fits: bool
):
    plan = parking(most, micro_batches=micro_batches, updates=updates)
    rejected = 0
    for name, mutant in mutants(plan, Random(seed)):
        mutant = with_figures(mutant) if fits else mutant
        try:
            mutant.check()
        except ScheduleError:
            rejected += 1
            continue
        try:
            find_harm(mutant, SMALL, seed=seed)
        except Harm as harm:
            raise AssertionError(f"{name}: {harm}\n{plan}\n{mutant}") from harm
    assert rejected > 50
    made = plan.instructions
    assert [name for name, other in other_instructions(made, Random(seed)) if not is_refused(plan, other)] == []
