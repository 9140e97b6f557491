"""Updates on the device: any blocks of a step, in any order of the streams; no other table passes the check."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import ScheduleError
from megatrain.scheduler.builder.draft import Builder, Choices
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule, schedule_of
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Position
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.every_other import num_rejected
from tests.scheduler.mutations import with_cells, with_figures
from tests.scheduler.symbolic import find_harm
from tests.scheduler.workloads import LAYER, assert_checked_and_read_back, trained, with_room_for_state

WORK, SMALL = (with_room_for_state(trained(count)) for count in (5, 3))


def planned(
    there: frozenset[int],
    *,
    updates: str = "spread",
    norm: str = "",
    micro_batches: int = 2,
    num_slots: int = 2,
    work: Workload = WORK,
) -> Schedule:
    clip, reports = norm == "clip" and updates != "spread", norm == "reported" and updates == "overlap"
    kind = StepKind("train", "copy", micro_batches, updates, clip, "release", reports)
    last = len(work.blocks) - 1
    return schedule_of(Builder(work, kind).table(Choices(num_slots, 1, (last,), device_updates=tuple(sorted(there)))))


def steps(work: Workload) -> st.SearchStrategy[Schedule]:
    return st.builds(
        partial(planned, work=work),
        st.frozensets(st.integers(0, len(work.blocks) - 1), min_size=1),
        updates=st.sampled_from(["overlap", "spread", "deferred"]),
        norm=st.sampled_from(["", "clip", "reported"]),
        micro_batches=st.integers(1, 3),
        num_slots=st.integers(1, 3),
    )


@given(steps(WORK), st.integers(0, 2**20))
@draws(60, usual=20)
def test_any_blocks_may_be_updated_there_and_neither_their_weights_nor_gradients_cross(plan: Schedule, seed: int):
    assert_checked_and_read_back(plan, WORK)
    find_harm(plan, WORK, seed=seed, runs=8)
    loads = [op.block for op in plan.ops if op.what == "W" and op.block not in plan.device_updates]
    assert plan.h2d_bytes - plan.park_bytes == LAYER * len(loads)
    assert plan.d2h_bytes - plan.park_bytes == LAYER * (5 - len(plan.device_updates))
    of_host = [op.block for op in plan.ops if (op.stream, op.what) == (Stream.HOST, "U")]
    assert sorted([*of_host, *plan.device_updates]) == [*range(5)]


@given(steps(SMALL), st.integers(0, 2**20), st.booleans())
@draws(20, usual=4)
def test_every_other_table_is_refused_or_harmless_and_all_other_instructions_are_refused(
    plan: Schedule, seed: int, fits: bool
):
    assert num_rejected(plan, SMALL, seed, fits=fits) > 100


def test_an_update_there_that_does_not_follow_the_norm_is_refused():
    plan = planned(frozenset({0, 2}), updates="deferred", norm="clip")
    norm = next(position.tick for position, op in plan.positions() if op.what == "N")
    update = plan.ticks[norm + 1].compute
    moved = with_cells(plan, {Position(norm + 1, Stream.COMPUTE): None, Position(norm, Stream.COMPUTE): update})
    with pytest.raises(ScheduleError, match=r"compute:U0 at tick \d+ is scaled by host:N"):
        with_figures(moved).check()


@pytest.mark.parametrize(
    "change",
    [
        {"device_updates": (0, 3)},
        {"device_updates": (3, 0)},
        {"device_updates": (9,)},
        {"persistent": (0,)},
        {"kind": StepKind(updates="serial", clip=True, micro_batches=2, outputs="release")},
        {"kind": StepKind(updates="deferred", clip=True, micro_batches=2, outputs="release")},
    ],
)
def test_blocks_that_have_no_such_update_or_no_room_are_refused(change: dict[str, object]):
    plan = planned(frozenset({0}))
    with pytest.raises(ScheduleError):
        replace(plan, **change).check()  # pyright: ignore[reportArgumentType]
    narrow = replace(WORK, blocks=tuple(replace(b, optimizer_bytes=b.optimizer_bytes + 64) for b in WORK.blocks))
    with pytest.raises(ScheduleError, match="its slot has"):
        plan.check(narrow)
    shared = replace(WORK, blocks=(replace(WORK.blocks[0], shares=(1,)), *WORK.blocks[1:]))
    with pytest.raises(ScheduleError, match="can't be updated on the device"):
        shared.check()
