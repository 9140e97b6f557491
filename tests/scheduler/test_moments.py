"""R and K in schedules: optimizer state that a file has is read before its update, and written after it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.bound import step_bound
from megatrain.scheduler.builder.build import build
from megatrain.scheduler.builder.moments import (
    buffer_bytes,
    ring,
    spared_bytes,
    spared_in_file,
    with_moments,
    with_state_in_file,
)
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule, schedule_of
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Op
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.mutations import position, with_cells, with_figures, with_moved
from tests.scheduler.workloads import Options, assert_checked_and_read_back, trained, whole_steps, workloads


def made(count: int, updates: str = "overlap") -> Schedule:
    return build(trained(count), StepKind(updates=updates, outputs="release"), num_slots=3)


def four(updates: str = "overlap") -> Schedule:
    return schedule_of(with_moments(made(4, updates), dict.fromkeys(range(4), 4096)))


@given(workloads(), whole_steps(), st.lists(st.sampled_from([0, 1, 5, 40]), min_size=7, max_size=7))
@draws(80, usual=20)
def test_a_step_with_moments_in_a_file_has_its_ops_in_their_order_and_those_of_the_disk(
    workload: Workload, chosen: Options, sizes: list[int]
):
    before = chosen.build(workload)
    found = schedule_of(with_moments(before, dict(enumerate(sizes))))
    workload = found.known_workload()
    for stream in (Stream.H2D, Stream.COMPUTE, Stream.D2H, Stream.HOST):
        mine, theirs = ([str(op) for op in each.ops if op.stream == stream] for each in (found, before))
        assert mine == theirs
    updated = [op.block for op in found.ops if op.stream == Stream.HOST and op.what == "U"]
    expected = [block for block in updated if workload.blocks[block].moment_bytes]
    for what in "RK":
        assert [op.block for op in found.ops if op.stream == Stream.DISK and op.what == what] == expected
    held: set[int] = set()
    for op in (op for op in found.ops if op.stream == Stream.DISK):
        held ^= {op.block}
        assert len(held) <= 2
    assert not held
    assert (found.device_bytes, found.host_bytes) == (before.device_bytes, before.host_bytes)
    assert_checked_and_read_back(found, workload)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_states_that_follow_each_other_have_buffers_of_their_own(sizes: list[int]):
    chosen = ring(sizes)
    assert all(one != other for one, other in pairwise(chosen))
    assert set(chosen) <= {0, 1, 2}


def test_much_larger_states_share_a_buffer():
    sizes = dict(enumerate([900, 10, 10, 10, 10, 900]))
    assert sum(buffer_bytes(with_moments(made(6), sizes)).values()) == 900 + 10 + 10


@pytest.mark.parametrize(
    ("updates", "cells", "rule"),
    [
        ("overlap", {"R2@1": None}, "disk:R2 is missing"),
        ("deferred", {"K1": None}, "disk:K1 is missing"),
        ("deferred", {"R0@0": 8}, r"host:U0 at tick 1 changes what is read by disk:R0@0 at tick 8"),
        ("overlap", {"K3": 6}, r"disk:K3 at tick 6 writes what is changed by host:U3 at tick 7"),
    ],
)
def test_a_table_that_lacks_an_op_of_the_disk_is_refused(updates: str, cells: dict[str, int | None], rule: str):
    schedule = four(updates)
    with pytest.raises(ScheduleError, match=rule):
        with_figures(with_moved(schedule, cells)).check()


def test_a_buffer_that_is_not_written_yet_is_not_filled():
    schedule = four()
    at = position(schedule, "R2@1")
    schedule = with_cells(schedule, {at: Op(Stream.DISK, "R", 2, slot=0)})
    with pytest.raises(ScheduleError, match=r"disk:R2@0 at tick 1 fills a buffer that is written by disk:K3 at tick 8"):
        with_figures(schedule).check()


def test_a_step_takes_as_long_as_its_disk():
    """Of 4 states of 4096 bytes, each is read and written: 32 KiB at 1 MB/s, and other streams are fast."""
    machine = Hardware(1e12, 1e12, 1e15, disk_bytes_per_s=1e6)
    simulation = four().simulate(machine)
    assert simulation.bound == Stream.DISK
    assert 8 * 4096e-6 <= simulation.step_s <= 1.01 * 8 * 4096e-6


SLOW_DISK = Hardware(1e12, 1e12, 1e15, host_bytes_per_s=1e12, disk_bytes_per_s=1e6)


@given(workloads(), whole_steps(), st.lists(st.sampled_from([0, 1, 5, 40]), min_size=7, max_size=7), st.integers(0, 99))
@draws(60, usual=20)
def test_as_much_state_is_in_the_file_as_the_host_lacks_room(
    workload: Workload, chosen: Options, sizes: list[int], least: int
):
    before = chosen.build(workload)
    found = schedule_of(with_state_in_file(before, sizes[: len(workload.blocks)], least, SLOW_DISK))
    host = [op.block for op in found.ops if op.stream == Stream.HOST and op.what == "U" and sizes[op.block]]
    filed = [op.block for op in found.ops if op.stream == Stream.DISK and op.what == "R"]
    every = spared_bytes({block: sizes[block] for block in host})
    assert spared_in_file(found) == spared_bytes({block: sizes[block] for block in filed})
    assert spared_in_file(found) >= min(least, every)
    assert filed or not least or every <= 0
    assert not filed or least
    assert_checked_and_read_back(found, found.known_workload())
    whole = with_moments(before, {block: sizes[block] for block in host})
    step_s = found.simulate(SLOW_DISK).step_s
    assert step_s <= schedule_of(whole).simulate(SLOW_DISK).step_s * (1 + 1e-9)
    assert step_bound(found.effects(), found.device_bytes, SLOW_DISK).seconds <= step_s * (1 + 1e-9)


def test_a_clipped_step_is_bound_by_the_disk_and_the_backward():
    machine = replace(SLOW_DISK, flops_per_s=1e9)
    table = schedule_of(with_moments(made(12, "deferred"), dict.fromkeys(range(12), 4096)))
    bound = step_bound(table.effects(), table.device_bytes, machine)
    assert bound.reason == "the disk, which has optimizer state, then the backward"
    assert 0.9 * table.simulate(machine).step_s < bound.seconds <= table.simulate(machine).step_s


@pytest.mark.parametrize("updates", ["overlap", "deferred", "spread"])
def test_what_stays_in_memory_is_spread_over_the_updates(updates: str):
    """Of 12 blocks half stay: while the device is at these, the disk is at the others."""
    table, machine = made(12, updates), replace(SLOW_DISK, flops_per_s=1e9)
    found = schedule_of(with_state_in_file(table, [4096] * 12, 4 * 4096, machine))
    filed = [op.block for op in found.ops if op.stream == Stream.DISK and op.what == "R"]
    assert len(filed) == 6  # of which two buffers have two
    order = [op.block for op in found.ops if op.stream == Stream.HOST and op.what == "U"]
    places = [order.index(block) for block in filed]
    assert {later - sooner for sooner, later in pairwise(places)} <= {1, 2, 3}
    runs = [schedule_of(with_moments(table, dict.fromkeys(each, 4096))) for each in (order[:6], order[6:])]
    best, worst = sorted(run.simulate(machine).step_s for run in runs)
    assert found.simulate(machine).step_s <= best * (1 + 1e-9)
    assert found.simulate(machine).step_s < 0.95 * worst


def test_a_state_that_needs_a_buffer_as_large_stays_in_memory():
    """One of the two large ones spares nothing that the other wouldn't, so none is read for what the small ones do."""
    sizes = [900, *[10] * 10, 900]
    found = with_state_in_file(made(12), sizes, 50, SLOW_DISK)
    assert {op.block for op in found.ops if op.stream == Stream.DISK} <= set(range(1, 11))
    found = with_state_in_file(made(12), sizes, 10**6, SLOW_DISK)
    assert {op.block for op in found.ops if op.stream == Stream.DISK} >= {0, 11}
    assert spared_in_file(found) == spared_bytes(dict(enumerate(sizes)))
