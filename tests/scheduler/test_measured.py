"""Measured costs: a run's own times give its own simulation, and that of other tables of the same program."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import expecttest
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import OptionError, ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.items import Stream
from megatrain.scheduler.op import Op
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import UPDATES
from megatrain.scheduler.table import Position
from megatrain.scheduler.timing.costs import Measured, op_durations
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.workloads import example, schedules, step_schedules, trained, whole_steps, workloads

RATES = st.floats(1e2, 1e6)
# Without launches micro-batches are alike: later ones have a kernel more, which adds up gradients.
MACHINES = st.builds(Hardware, RATES, RATES, RATES, st.just(0.0), RATES)
MACHINE = Hardware(1e9, 5e8, 1e9, 0.0, 1e9)


def measured(plan: Schedule, machine: Hardware = MACHINE) -> Measured:
    return Measured.of(plan, op_durations(plan, machine))


@given(st.one_of(schedules(), step_schedules()), MACHINES)
@draws(80)
def test_a_run_measured_on_a_machine_simulates_as_on_that_machine(plan: Schedule, machine: Hardware):
    found = measured(plan, machine)
    assert plan.simulate(found) == plan.simulate(machine)
    assert plan.critical_path(found) == plan.critical_path(machine)
    assert plan.lower_bounds(found) == plan.lower_bounds(machine)


@given(workloads(), whole_steps(), whole_steps(), MACHINES)
@draws(150, usual=15)
def test_another_table_of_the_program_is_predicted_exactly_or_an_op_is_named(
    workload: Workload, options, others, machine: Hardware
):
    """Where times follow from rates, micro-batches are alike, so a prediction has no error."""
    ran, other = options.build(workload), replace(others, transfer=options.transfer, keep=options.keep).build(workload)

    def kind_of(plan: Schedule, op: Op) -> tuple[Any, ...]:
        has_squares = op.what == "U" and plan.kind.reports_norm
        persists = op.what == "W" and op.block in plan.persistent
        is_saved = op.what in "FB" and op.block in plan.saves
        has_results = op.what in "FBA" and op.block in plan.results
        return op.stream, op.what, op.block, is_saved, has_results, has_squares, persists

    seen = {kind_of(ran, op) for op in ran.ops}
    unseen = {f"{op.stream}:{op}" for op in other.ops if kind_of(other, op) not in seen}
    found = measured(ran, machine)
    if unseen:
        with pytest.raises(ScheduleError) as caught:
            other.simulate(found)
        first = str(caught.value).splitlines()[0]
        assert first.endswith("was never measured.")
        assert first.split(" at tick ")[0].rstrip("*~+-") in unseen
    elif ran.parked() == other.parked():
        assert other.simulate(found).step_s == pytest.approx(other.simulate(machine).step_s)


@pytest.mark.parametrize("updates", UPDATES)
def test_a_run_predicts_other_numbers_of_micro_batches_and_slots(updates: str):
    ran = schedule(trained(6), num_slots=2, micro_batches=2, updates=updates, keep=2)
    found = measured(ran)
    for num_slots in (1, 2, 3):
        for micro_batches in (1, 2, 8):
            other = schedule(trained(6), num_slots=num_slots, micro_batches=micro_batches, updates=updates, keep=2)
            assert other.simulate(found).step_s == pytest.approx(other.simulate(MACHINE).step_s)


def timed(plan: Schedule, **seconds: float) -> dict[Position, float]:
    """A millisecond for each op, but for those that are named."""
    names = {name.replace("_", "."): found for name, found in seconds.items()}
    return {p: names.get(str(op).split("@")[0], 1e-3) for p, op in plan.positions()}


def test_a_micro_batch_that_was_not_seen_takes_the_median_of_the_others():
    three, five = (schedule(trained(2), micro_batches=n) for n in (3, 5))
    found = Measured.of(three, timed(three, F0_0=1.0, F0_1=2.0, F0_2=30.0))
    durations = {str(op): s for (_, op), s in zip(five.positions(), op_durations(five, found).values(), strict=True)}
    assert [durations[f"F0.{n}"] for n in range(5)] == [1.0, 2.0, 30.0, 2.0, 2.0]
    assert durations["F1.4"] == 1e-3
    one = schedule(trained(2), updates="none")
    assert op_durations(one, found)[next(p for p, op in one.positions() if str(op) == "F0")] == 1.0


def test_copies_of_one_block_count_as_one_op_however_often_they_come():
    plan = schedule(trained(4))
    first, second = (p for p, op in plan.positions() if (op.what, op.block) == ("W", 0))
    found = Measured.of(plan, {**timed(plan), first: 1.0, second: 2.0})
    assert {op_durations(plan, found)[p] for p in (first, second)} == {1.5}


def test_what_leaves_and_what_returns_are_different_ops():
    plan = schedule(trained(4), keep=1)
    seconds = timed(plan) | {p: 7.0 for p, op in plan.positions() if op.what == "A" and p.stream == Stream.H2D}
    assert op_durations(plan, Measured.of(plan, seconds)) == seconds


def test_a_retained_graph_is_another_op_than_a_recomputed_one():
    recomputed, kept = (schedule(trained(4), activations=a) for a in ("recompute", "keep"))
    with pytest.raises(ScheduleError) as caught:
        kept.simulate(measured(recomputed))
    assert str(caught.value) == (
        "compute:F0* at tick 1 was never measured.\n"
        "  A schedule can be timed if all of its ops were measured. A retained graph (*), results that are kept (~), "
        "squares for a norm (+) and weights that persist (-) make other ops.\n"
        "  Measure a run of this schedule, or of one with the same `saves`, `results`, `keep` and `persistent`."
    )
    both = Measured.mean([measured(recomputed), measured(kept)])
    for plan in (recomputed, kept):
        assert plan.simulate(both) == plan.simulate(MACHINE)


def test_an_update_that_never_ran_is_named():
    for updates, name in (("serial", "host:U3"), ("deferred", "host:U0"), ("overlap", "host:U3")):
        with pytest.raises(ScheduleError, match=f"^{name} at tick "):
            schedule(trained(4), updates=updates).simulate(measured(schedule(trained(4))))


def test_several_runs_count_as_their_median_in_any_order():
    plan = schedule(trained(3), updates="overlap")
    runs = [Measured.of(plan, timed(plan, F1=s, U2=2 * s)) for s in (5.0, 1.0, 100.0)]
    whole = Measured.mean(runs)
    durations = op_durations(plan, whole)
    names = {str(op): durations[p] for p, op in plan.positions()}
    assert (names["F1"], names["U2"], names["F0"]) == (5.0, 10.0, 1e-3)
    assert Measured.mean(runs[::-1]) == whole
    assert str(Measured.mean(runs[::-1])) == str(whole)
    assert Measured.mean(runs[:1]) == runs[0]
    assert Measured.mean([whole, whole]) == whole
    # The step before updates has none, so its run has a say in the others only.
    before = schedule(trained(3))
    mixed = Measured.mean([runs[0], Measured.of(before, timed(before, F1=7.0))])
    assert [mixed.seconds[kind] for kind in mixed.seconds if str(kind) in ("F1.0", "U2")] == [6.0, 10.0]


def test_slower_updates_lengthen_a_measured_step_as_they_do_a_given_one():
    plan = schedule(trained(8), updates="overlap")
    slow = Measured.of(plan, {p: 1.0 if op.what == "U" else 1e-3 for p, op in plan.positions()})
    found = plan.simulate(slow)
    assert found.bound == Stream.HOST
    assert 8.0 < found.step_s < 8.1


@pytest.mark.parametrize("seconds", [-1e-9, float("nan"), float("inf")])
def test_an_impossible_time_is_refused(seconds: float):
    plan = schedule(trained(3))
    with pytest.raises(OptionError, match=r"^compute:F1\.0 can't take "):
        Measured.of(plan, timed(plan, F1=seconds))


def test_times_and_ops_must_fit_each_other():
    plan = schedule(trained(3))
    last, op = list(plan.positions())[-1]
    with pytest.raises(ScheduleError, match=f"^d2h:{op} at tick {last.tick} has no time"):
        Measured.of(plan, {p: s for p, s in timed(plan).items() if p != last})
    with pytest.raises(ScheduleError, match="a time for host at tick 99, where the table has no op"):
        Measured.of(plan, {**timed(plan), Position(99, Stream.HOST): 1.0})


def test_another_program_is_refused():
    four, bound = schedule(trained(4)), schedule(trained(3), transfer="bind")
    found = measured(schedule(trained(3)))
    for other in (four, bound):
        with pytest.raises(ScheduleError, match="the measurement has 3 blocks with `copy`, this schedule has"):
            other.simulate(found)
        with pytest.raises(ScheduleError, match="2 runs of 2 programs"):
            Measured.mean([found, measured(other)])
    with pytest.raises(ScheduleError, match="0 runs"):
        Measured.mean([])


def test_long_tables_are_timed_in_seconds():
    """Each op looks its time up; going through all saves or all times for each would take minutes."""
    plan = schedule(trained(600), activations="keep", micro_batches=4)
    shuffled = list(op_durations(plan, MACHINE).items())
    Random(0).shuffle(shuffled)
    found = Measured.of(plan, dict(shuffled))
    assert str(found) == str(measured(plan))
    more = schedule(trained(600), activations="keep", micro_batches=5)
    assert len(op_durations(more, found)) == len(more.ops)


class TestPrintedMeasurements(expecttest.TestCase):
    maxDiff = None

    def test_every_op_has_a_line_in_the_order_of_streams_and_blocks(self):
        plan = schedule(trained(3), keep=1, micro_batches=2, updates="deferred", clip=True)
        seconds = {p: (1 + i) * 1e-3 for i, (p, _) in enumerate(plan.positions())}
        self.assertExpectedInline(
            str(Measured.of(plan, seconds)),
            """\
measured: 3 blocks, transfer copy; ms
  h2d      W0            10.500
  h2d      W1             4.000
  h2d      W2             9.000
  h2d      A1.0          15.000
  h2d      A1.1          17.000
  compute  F0.0           5.000
  compute  F0.1           7.000
  compute  F1.0          10.000
  compute  F1.1          12.000
  compute  F2.0*         13.000
  compute  F2.1*         16.000
  compute  B0.0          23.000
  compute  B0.1          25.000
  compute  B1.0          20.000
  compute  B1.1          21.000
  compute  B2.0*         14.000
  compute  B2.1*         18.000
  d2h      A1.0           8.000
  d2h      A1.1          11.000
  d2h      G0            27.000
  d2h      G1            26.000
  d2h      G2            22.000
  host     S0            29.000
  host     S1            28.000
  host     S2            24.000
  host     N             30.000
  host     U0             1.000
  host     U1             3.000
  host     U2             6.000""",
        )

    def test_an_empty_program(self):
        plan = schedule(Workload((), (), ()))
        self.assertExpectedInline(str(Measured.of(plan, {})), """measured: 0 blocks, transfer copy; ms""")
        assert plan.simulate(Measured.of(plan, {})).step_s == 0


def test_text_and_order_of_times_have_nothing_to_do_with_each_other():
    plan = schedule(example(), keep=1)
    seconds = op_durations(plan, MACHINE)
    backwards = dict(reversed(list(seconds.items())))
    assert str(Measured.of(plan, seconds)) == str(Measured.of(plan, backwards))
