"""Costs and simulation: times that follow from rates, and bounds that hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import OptionError
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.effects import streams
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.table import Position
from megatrain.scheduler.timing.costs import op_durations
from megatrain.scheduler.timing.shared import link_bound, shared_timeline
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.workloads import chain, example, schedules, step_schedules, workloads

RATES = st.floats(1e2, 1e6)
MACHINES = st.builds(Hardware, RATES, RATES, RATES, st.sampled_from([0.0, 1e-6, 1e-3]))


@given(schedules(), MACHINES)
@draws(60)
def test_a_simulated_step_is_as_long_as_its_longest_chain(plan: Schedule, machine: Hardware):
    found = plan.simulate(machine)
    seconds, path = plan.critical_path(machine)
    assert found.step_s == pytest.approx(seconds)
    assert all(a.tick < b.tick for a, b in pairwise(path))
    for bound in plan.lower_bounds(machine).values():
        assert found.step_s >= bound * (1 - 1e-9)
    assert all(0 <= fraction <= 1 + 1e-9 for fraction in found.busy.values())
    assert [t.position for t in found.timeline] == [p for p, _ in plan.positions()]


@given(schedules(), MACHINES)
@draws(30)
def test_ops_of_one_stream_never_overlap_and_follow_what_they_wait_for(plan: Schedule, machine: Hardware):
    timeline = {t.position: t for t in plan.simulate(machine).timeline}
    free = dict.fromkeys(streams(), 0.0)
    for position, before in plan.waits().items():
        assert timeline[position].start_s >= max([free[position.stream], *(timeline[b].end_s for b in before)])
        free[position.stream] = timeline[position].end_s


@given(workloads(), st.integers(1, 3))
@draws(30)
def test_one_more_slot_never_breaks_a_schedule(workload: Workload, num_slots: int):
    fewer, more = schedule(workload, num_slots=num_slots), schedule(workload, num_slots=num_slots + 1)
    more.check()
    assert more.h2d_bytes <= fewer.h2d_bytes


def test_a_second_slot_overlaps_copies_with_compute():
    workload = chain([10**6] * 8, act=0)
    machine = Hardware(1e9, 1e9, 1e9)
    assert schedule(workload, num_slots=2).simulate(machine).step_s < (
        0.8 * schedule(workload, num_slots=1).simulate(machine).step_s
    )


def test_durations_follow_from_bytes_and_work():
    plan = schedule(example(), keep=2)
    seconds = op_durations(plan, Hardware(1e6, 1e5, 1e6, launch_s=0.5))
    assert seconds[Position(0, Stream.H2D)] == pytest.approx(0.5 + 65536 / 1e6)
    assert seconds[Position(1, Stream.COMPUTE)] == pytest.approx(0.5 + 1)
    assert seconds[Position(2, Stream.D2H)] == pytest.approx(0.5 + 8192 / 1e5)
    assert seconds[Position(5, Stream.COMPUTE)] == pytest.approx(0.5 + 2)
    assert seconds[Position(6, Stream.COMPUTE)] == pytest.approx(0.5 + 1 + 0.5 + 2)  # a recompute is a forward
    bound = schedule(example(), transfer="bind")
    assert op_durations(bound, Hardware(1, 1, 1e6))[Position(0, Stream.H2D)] == 0


SHARES = st.floats(0.3, 1.0)
SHARED = st.builds(
    Hardware,
    *(RATES, RATES, RATES, st.sampled_from([0.0, 1e-3]), RATES),
    h2d_beside=SHARES,
    d2h_beside=SHARES,
    host_beside=SHARES,
    compute_beside=SHARES,
)


@given(st.one_of(schedules(), step_schedules()), SHARED)
@draws(60)
def test_streams_that_slow_each_other_down_still_end_in_order_and_respect_bounds(plan: Schedule, machine: Hardware):
    found, alone = plan.simulate(machine), op_durations(plan, machine)
    timeline = {t.position: t for t in found.timeline}
    assert list(timeline) == [p for p, _ in plan.positions()]
    free = dict.fromkeys(streams(), 0.0)
    for position, before in plan.waits().items():
        timing = timeline[position]
        earliest = max([free[position.stream], *(timeline[b].end_s for b in before)])
        assert timing.start_s == pytest.approx(earliest, abs=1e-9)
        rounding = 1e-12 * timing.end_s  # of the difference of two late moments
        assert timing.end_s - timing.start_s >= alone[position] * (1 - 1e-9) - rounding
        free[position.stream] = timing.end_s
    assert found.step_s == pytest.approx(plan.critical_path(machine)[0])
    bounds = plan.lower_bounds(machine)
    assert all(found.step_s >= bound * (1 - 1e-9) for bound in bounds.values())
    if machine.is_shared and any(p.stream in ("h2d", "d2h") and s > 0 for p, s in alone.items()):
        assert bounds["link"] >= max(bounds.get("h2d", 0), bounds.get("d2h", 0)) * (1 - 1e-9)


@given(schedules(), SHARED)
@draws(30)
def test_shares_of_one_change_nothing_and_smaller_ones_only_lengthen(plan: Schedule, machine: Hardware):
    whole = replace(machine, h2d_beside=1.0, d2h_beside=1.0, host_beside=1.0, compute_beside=1.0)
    nearly = replace(whole, host_beside=1 - 1e-12)
    assert not whole.is_shared
    assert nearly.is_shared
    assert plan.simulate(nearly).step_s == pytest.approx(plan.simulate(whole).step_s)


def test_copies_both_ways_take_as_long_as_done_by_hand():
    """An A100's link: 24.8 alone, 11 and 24 together. 24 bytes leave in a second, in which 11 of 35.8 come."""
    machine = Hardware(24.8, 24.8, 1.0, h2d_beside=11 / 24.8, d2h_beside=24 / 24.8)
    up, down = Position(0, Stream.H2D), Position(0, Stream.D2H)
    durations = {up: 35.8 / 24.8, down: 24 / 24.8}
    timeline = {t.position: t.end_s for t in shared_timeline(durations, {up: (), down: ()}, machine)}
    assert timeline == {up: pytest.approx(2.0), down: pytest.approx(1.0)}
    assert link_bound(durations[up], durations[down], machine) == pytest.approx(2.0)
    assert link_bound(1.0, 0.0, machine) == 1.0
    slower = replace(machine, d2h_beside=0.4)  # both ways at once do less than one after the other
    assert link_bound(1.0, 0.5, slower) == 1.5
    after = shared_timeline(
        {**durations, Position(1, Stream.D2H): 1.0}, {up: (), down: (), Position(1, Stream.D2H): (up,)}, machine
    )
    assert [t.end_s for t in after] == pytest.approx([2.0, 1.0, 3.0])


def test_ops_that_end_soon_after_each_other_keep_their_own_ends():
    here = {Position(0, stream): 1.0 + number / 10 for number, stream in enumerate(streams()[:4])}
    ends = shared_timeline(here, dict.fromkeys(here, ()), replace(Hardware(1, 1, 1), host_beside=1 - 1e-12))
    assert [timing.end_s for timing in ends] == pytest.approx([1.0, 1.1, 1.2, 1.3])


def test_the_stream_that_works_longest_is_named():
    plan = schedule(example())
    assert plan.simulate(Hardware(1e3, 1e9, 1e12)).bound == "h2d"
    assert plan.simulate(Hardware(1e12, 1e9, 1e6)).bound == "compute"
    assert str(plan.simulate(Hardware(1e12, 1e12, 1e6))).endswith("bound by compute")


@pytest.mark.parametrize("rates", [(0, 1, 1, 0), (1, -1, 1, 0), (1, 1, 0, 0), (1, 1, 1, -1)])
def test_impossible_hardware_is_refused(rates):
    with pytest.raises(OptionError, match=r"is not above 0|is less than 0"):
        Hardware(*rates)
