"""What a report says of memory: curve and holders of the peak add up to the schedule's figures."""

from __future__ import annotations

from hypothesis import given

from megatrain.scheduler.bands import band_of
from megatrain.scheduler.lifetimes import Books, find_peak
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.simulate import TimedRun
from megatrain.tools.reporting.figures import at_peak, device_curve
from tests.draws import draws
from tests.reporting.steps import drawn


@given(drawn())
@draws(100, usual=10)
def test_where_each_tick_takes_a_second_the_curve_reaches_the_planned_peak_and_no_more(plan: Schedule):
    run = TimedRun.of(plan, {position: (position.tick, position.tick + 1) for position, _ in plan.positions()})
    instructions = plan.instructions
    found = device_curve(Books(plan), instructions, band_of("measured", "", plan, run.timeline))
    assert max(total for _, total in found.totals) == plan.device_bytes
    assert all(size >= 0 for _, sizes in found.points for size in sizes)


@given(drawn())
@draws(100, usual=10)
def test_the_holders_of_the_peak_are_all_of_its_bytes(plan: Schedule):
    found, parts = at_peak(plan, Books(plan)), dict(find_peak(plan).parts)
    sums = dict.fromkeys((holder.part for holder in found.holders), 0)
    for holder in found.holders:
        sums[holder.part] += holder.nbytes
    assert found.nbytes == plan.device_bytes
    assert sums == parts
    assert [h.nbytes for h in found.holders] == sorted((h.nbytes for h in found.holders), reverse=True)
