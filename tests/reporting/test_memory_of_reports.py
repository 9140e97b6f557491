"""What a report says of memory: curve, holders of the peak and addresses add up to the schedule's figures."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from megatrain.reporting.address_maps import address_maps
from megatrain.reporting.memory_curve import curve, held_on_device, held_on_host
from megatrain.reporting.peak_holders import at_peak
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.lifetimes.books import Books
from megatrain.scheduler.lifetimes.peak import find_peak
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.timing.bands import measured_band, planned_band
from megatrain.scheduler.timing.costs import Hardware, op_durations
from megatrain.scheduler.timing.timed_run import TimedRun
from tests.draws import draws
from tests.reporting.steps import drawn, made, small
from tests.scheduler.workloads import trained

RATES = st.floats(1e2, 1e6)
MACHINES = st.builds(Hardware, RATES, RATES, RATES, st.sampled_from([0.0, 1e-3]), RATES)


@given(drawn())
@draws(100, usual=10)
def test_where_each_tick_takes_a_second_the_curve_reaches_the_planned_peak_and_no_more(plan: Schedule):
    run = TimedRun.of(plan, {position: (position.tick, position.tick + 1) for position, _ in plan.positions()})
    books, instructions = Books(plan), plan.instructions
    found = curve(held_on_device(books, instructions), measured_band(instructions, run, ""))
    assert max(total for _, total in found.totals) == plan.device_bytes
    assert all(size >= 0 for _, sizes in found.points for size in sizes)


@given(drawn(), MACHINES)
@draws(100, usual=10)
def test_at_no_moment_of_any_timing_more_lives_than_is_planned(plan: Schedule, machine: Hardware):
    books, instructions = Books(plan), plan.instructions
    band = planned_band(instructions, op_durations(plan, machine), "")
    for held, bound in ((held_on_device, plan.device_bytes), (held_on_host, plan.host_bytes)):
        found = curve(held(books, instructions), band)
        assert max(total for _, total in found.totals) <= bound
        assert [moment for moment, _ in found.points] == sorted({moment for moment, _ in found.points})
        assert found.points[0][0] == 0


@given(drawn())
@draws(100, usual=10)
def test_the_holders_of_the_peak_are_all_of_its_bytes(plan: Schedule):
    found, parts = at_peak(plan, Books(plan)), dict(find_peak(plan).parts)
    assert found.nbytes == plan.device_bytes
    assert {part: sum(h.nbytes for h in found.of(part)) for part in parts} == parts
    assert {holder.part for holder in found.holders} == set(parts)
    assert [h.nbytes for h in found.holders] == sorted((h.nbytes for h in found.holders), reverse=True)


class TestHolders(TestCase):
    def test_the_holders_of_the_peak_have_names(self) -> None:
        found = made().figures.peak
        assert "\n".join(f"  {line}" for line in found.words()) in str(made())
        self.assertExpectedInline(
            "\n".join(f"{holder.nbytes} {holder.name}" for holder in found.holders),
            """\
165632 workspace of B2.1
132864 gradients of block 2 (layers.2)
132864 gradients of block 3 (layers.3)
132864 weights of block 1 (layers.1)
132864 weights of block 2 (layers.2)
8192 value v0 of micro-batch 0
8192 value v1 of micro-batch 1
8192 gradient of value v1 of micro-batch 0
8192 gradient of value v1 of micro-batch 1
8192 gradient of value v2 of micro-batch 1
256 value ids of micro-batch 0
256 value ids of micro-batch 1""",
        )


def assert_apart(plan: Schedule) -> None:
    for each in address_maps(plan, Books(plan), plan.instructions):
        for area in each.areas:
            assert 0 <= area.offset < area.offset + area.nbytes <= each.nbytes
            assert 0 <= area.first <= area.last < len(plan.ticks)
        for one, other in combinations(each.areas, 2):
            same_ticks = one.first <= other.last and other.first <= one.last
            same_bytes = one.offset < other.offset + other.nbytes and other.offset < one.offset + one.nbytes
            assert not (same_ticks and same_bytes), (each.name, one, other)


@given(drawn())
@draws(100, usual=10)
def test_no_two_areas_of_an_arena_hold_a_byte_at_the_same_tick(plan: Schedule):
    assert_apart(plan)


@pytest.mark.parametrize("clip", [False, True])
def test_each_prefetch_park_and_offload_has_its_area(clip: bool):
    plan = small(clip=clip)
    maps = {each.name: each.areas for each in made(plan).figures.maps}
    assert_apart(plan)
    counts = {what: sum(op.what == what for op in plan.ops) for what in "WG"}
    assert len(maps["weights in slots"]) == counts["W"]
    assert len(maps["parked values"]) == sum(op.what == "A" for op in plan.ops) / 2
    # Deferred updates use gradients of the step before, which wait from its start.
    assert len(maps["gradients that wait for updates"]) == counts["G"] * (2 if clip else 1)


def test_where_weights_are_used_in_place_there_is_no_arena():
    plan = schedule(trained(4), transfer="bind", activations="keep")
    assert made(plan).figures.maps == ()


def test_weights_that_stay_across_steps_lie_there_all_the_time():
    works = trained(4)
    blocks = [
        replace(block, frozen_bytes=block.state_bytes, gradient_bytes=0, update_bytes=0) for block in works.blocks
    ]
    frozen = replace(works, blocks=(*blocks[:3], works.blocks[3]))
    plan = schedule(frozen, updates="overlap", outputs="release", memory=10**7)
    assert plan.persistent == (0, 1, 2)
    assert_apart(plan)
    maps = {each.name: each.areas for each in made(plan).figures.maps}
    for area in maps["weights in slots"]:
        is_whole = (area.first, area.last) == (0, len(plan.ticks) - 1)
        assert is_whole == (area.block in plan.persistent), area
    holders = {holder.name for holder in made(plan).figures.peak.holders}
    assert {f"weights of block {b} (layers.{b})" for b in plan.persistent} <= holders
