"""TimedRun: the moments of a step as it ran, and the measured costs that follow from them."""

from __future__ import annotations

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import ScheduleError
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.table import Position
from megatrain.scheduler.timing.costs import Hardware
from megatrain.scheduler.timing.timed_run import TimedRun
from tests.draws import draws
from tests.scheduler.workloads import schedules, step_schedules, trained

RATES = st.floats(1e2, 1e6)
MACHINES = st.builds(Hardware, RATES, RATES, RATES, st.sampled_from([0.0, 1e-3]), RATES)
CARD = Hardware(25e9, 25e9, 1e11, host_bytes_per_s=60e9)


def spans(plan: Schedule, machine: Hardware = CARD) -> dict[Position, tuple[float, float]]:
    return {timing.position: (timing.start_s, timing.end_s) for timing in plan.simulate(machine).timeline}


@given(st.one_of(schedules(), step_schedules()), MACHINES, st.floats(-1e3, 1e3))
@draws(60)
def test_a_run_as_simulated_is_timed_and_measured_as_on_that_machine(plan: Schedule, machine: Hardware, zero: float):
    found = spans(plan, machine)
    run = TimedRun.of(plan, {p: (begin + zero, end + zero) for p, (begin, end) in found.items()})
    assert [t.position for t in run.timeline] == [p for p, _ in plan.positions()]
    for timing in run.timeline:
        assert (timing.start_s, timing.end_s) == pytest.approx(found[timing.position], abs=1e-9)
    # An op of one block that recurs, such as a `W`, counts as the median of its times, which are all alike here.
    assert plan.simulate(run.measured()).step_s == pytest.approx(plan.simulate(machine).step_s, abs=1e-6)
    assert run.step_s == pytest.approx(plan.simulate(machine).step_s, abs=1e-9)


def test_an_op_counts_from_when_it_could_have_begun():
    plan = schedule(trained(2), updates="overlap")
    found = spans(plan)
    first = next(position for position, op in plan.positions() if str(op) == "F0")
    begin, end = found[first]
    late = TimedRun.of(plan, {**found, first: (begin + (end - begin) / 2, end)})
    assert late.measured() == TimedRun.of(plan, found).measured()
    assert late != TimedRun.of(plan, found)


def test_ops_of_a_stream_never_overlap_though_clocks_are_coarse():
    plan = schedule(trained(3))
    early = {position: (begin - 2e-6, end) for position, (begin, end) in spans(plan).items()}
    run = TimedRun.of(plan, early)
    free: dict[str, float] = {}
    for timing in run.timeline:
        stream = timing.position.stream
        assert free.get(stream, 0.0) <= timing.start_s <= timing.end_s
        free[stream] = timing.end_s


def test_times_that_are_missing_or_of_nothing_are_refused():
    plan = schedule(trained(2))
    found = spans(plan)
    first = next(iter(found))
    with pytest.raises(ScheduleError, match=r"^h2d:W0@0 at tick 0 has no times\.\n.*\n  Time a step with"):
        TimedRun.of(plan, {p: span for p, span in found.items() if p != first})
    with pytest.raises(ScheduleError, match=r"^there are times of ops that the table doesn't have"):
        TimedRun.of(plan, {**found, first._replace(tick=99): (0.0, 1.0)})
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ScheduleError, match=r"^a time of the run isn't finite"):
            TimedRun.of(plan, {**found, first: (0.0, wrong)})


class TestText(TestCase):
    def test_a_run_prints_each_op(self) -> None:
        plan = schedule(trained(1), updates="overlap")
        run = TimedRun.of(plan, spans(plan))
        self.assertExpectedInline(
            str(run),
            """\
timed run: 5 ops, 0.056 ms
   0  h2d      W0@0           0.000       0.005
   1  compute  F0             0.005       0.015
   2  compute  B0             0.015       0.035
   3  d2h      G0             0.035       0.041
   4  host     U0             0.041       0.056""",
        )
        self.assertExpectedInline(repr(run), """<TimedRun: 5 ops, 0.056 ms>""")
