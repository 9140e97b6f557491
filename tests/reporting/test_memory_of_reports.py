"""What a report says of memory: curve and holders of the peak add up to the schedule's figures."""

from __future__ import annotations

from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from megatrain.reporting.figures import at_peak, device_curve
from megatrain.scheduler.bands import band_of
from megatrain.scheduler.lifetimes import Books, find_peak
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.simulate import Hardware, TimedRun
from tests.draws import draws
from tests.reporting.steps import drawn, made

RATES = st.floats(1e2, 1e6)
MACHINES = st.builds(Hardware, RATES, RATES, RATES, st.sampled_from([0.0, 1e-3]), RATES)


@given(drawn())
@draws(100, usual=10)
def test_where_each_tick_takes_a_second_the_curve_reaches_the_planned_peak_and_no_more(plan: Schedule):
    run = TimedRun.of(plan, {position: (position.tick, position.tick + 1) for position, _ in plan.positions()})
    instructions = plan.instructions
    found = device_curve(Books(plan), instructions, band_of("measured", "", plan, run.timeline))
    assert max(total for _, total in found.totals) == plan.device_bytes
    assert all(size >= 0 for _, sizes in found.points for size in sizes)


@given(drawn(), MACHINES)
@draws(100, usual=10)
def test_at_no_moment_of_any_timing_more_lives_than_is_planned(plan: Schedule, machine: Hardware):
    instructions = plan.instructions
    band = band_of("plan", "", plan, plan.simulate(machine).timeline)
    found = device_curve(Books(plan), instructions, band)
    assert max(total for _, total in found.totals) <= plan.device_bytes
    assert [moment for moment, _ in found.points] == sorted({moment for moment, _ in found.points})
    assert found.points[0][0] == 0


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
