"""E and L in schedules: parked values go on to a file and come back, through buffers that nothing overwrites."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.base.sizes import PAGE
from megatrain.errors import ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.build import build
from megatrain.scheduler.builder.evictions import with_evictions
from megatrain.scheduler.builder.moments import with_moments
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule, schedule_of
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import parse_op
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.every_other import num_rejected
from tests.scheduler.mutations import position, with_cells, with_figures
from tests.scheduler.symbolic import find_harm
from tests.scheduler.workloads import Options, assert_checked_and_read_back, trained, whole_steps, workloads

FIVE, FOUR = trained(5), trained(4)


def parking(
    most: int | None = 0, *, micro_batches: int = 2, updates: str = "overlap", work: Workload = FIVE
) -> Schedule:
    """Parks inputs of all blocks but two, each of two pages."""
    kind = StepKind(updates=updates, outputs="release", micro_batches=micro_batches)
    return schedule_of(with_evictions(build(work, kind, num_slots=2, activations="offload"), most))


def larger(workload: Workload) -> Workload:
    """The workload with values of up to four pages, so that buffers for a few of them spare something."""
    values = tuple(replace(value, nbytes=512 * value.nbytes) for value in workload.values)
    return replace(workload, values=values, storages=tuple(512 * nbytes for nbytes in workload.storages))


def disk(plan: Schedule) -> list[str]:
    return [str(op) for op in plan.ops if op.stream == Stream.DISK]


@given(workloads(), whole_steps(), st.integers(0, 4), st.sampled_from([0, 5]), st.integers(0, 2**20))
@draws(80, usual=20)
def test_any_part_of_what_is_parked_may_be_in_a_file_whatever_runs_first(
    workload: Workload, chosen: Options, quarters: int, moments: int, seed: int
):
    before = schedule_of(with_moments(chosen.build(larger(workload)), dict.fromkeys(range(7), moments)))
    workload = before.known_workload()
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
    st.sampled_from(["overlap", "spread", "deferred"]),
    st.integers(0, 2**20),
    st.booleans(),
)
@draws(20, usual=1)
def test_every_other_table_is_refused_or_harmless_and_all_other_instructions_are_refused(
    updates: str, seed: int, fits: bool
):
    assert num_rejected(parking(updates=updates, work=FOUR), FOUR, seed, fits=fits) > 50


@pytest.mark.parametrize(
    ("cells", "rule"),
    [
        ({"E1@0": None}, "disk:E1 is missing"),
        ({"L2@0": None}, "disk:L2 is missing"),
        ({"E1@0": "L1@2", "L1@1": "E1@0"}, r"disk:L1@2 at tick \d+ reads what is written by disk:E1@0"),
        ({"E2@1": "E2@0"}, r"d2h:A2 at tick \d+ fills a buffer that is emptied by disk:E1@0"),
        ({"L2@0": "L2@1"}, r"disk:L2@1 at tick \d+ fills a buffer that is emptied by h2d:A3"),
    ],
)
def test_a_table_whose_chunks_do_not_pass_one_by_one_is_refused(cells: dict[str, str | None], rule: str):
    plan = parking(micro_batches=1)
    changes = {position(plan, old): None if new is None else parse_op(new, Stream.DISK) for old, new in cells.items()}
    with pytest.raises(ScheduleError, match=rule):
        with_figures(with_cells(plan, changes)).check()


def test_the_first_blocks_go_to_the_file_and_no_more_than_need_be():
    """Three blocks park two pages of each of two micro-batches; two buffers take as much as one block."""
    found = {most: parking(most * PAGE).evicted for most in (12, 11, 8, 7, 0)}
    assert found == {12: (), 11: (1, 2), 8: (1, 2), 7: (1, 2, 3), 0: (1, 2, 3)}
    assert [parking(most * PAGE).park_bytes // PAGE for most in found] == [12, 8, 8, 4, 4]


def test_a_step_takes_as_long_as_its_disk():
    """Each of six chunks is written and read at 1 MB/s, and other streams are fast."""
    machine = Hardware(1e12, 1e12, 1e15, disk_bytes_per_s=1e6)
    plan = parking()
    simulation = plan.simulate(machine)
    assert simulation.bound == Stream.DISK
    assert 2 * plan.evicted_bytes * 1e-6 <= simulation.step_s <= 1.01 * 2 * plan.evicted_bytes * 1e-6
