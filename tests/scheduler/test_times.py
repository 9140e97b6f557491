"""Times: simulated from rates, measured from runs, and bounds that hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import OptionError, ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.bands import band_of
from megatrain.scheduler.effects import streams
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.simulate import Measured, TimedRun, op_durations, shared_timeline
from megatrain.scheduler.table import Position
from tests.draws import draws
from tests.scheduler.workloads import (
    example,
    schedules,
    step_schedules,
    trained,
)

RATES, SHARES = st.floats(1e2, 1e6), st.floats(0.3, 1.0)
BESIDE = ("h2d_beside", "d2h_beside", "compute_beside")
ALONE = {**dict.fromkeys(BESIDE, 1.0), "host_bytes_per_s": inf}
SHARED = st.builds(
    Hardware,
    *(RATES, RATES, RATES, st.sampled_from([0.0, 1e-3]), RATES),
    **dict.fromkeys(BESIDE, SHARES),
)
# Without launches micro-batches are alike: later ones have a kernel more, which adds up gradients. And without a rate
# of host memory, which streams share, an op takes as long next to any others.
MACHINES = st.builds(Hardware, RATES, RATES, RATES, st.just(0.0), op_s=st.sampled_from([0.0, 1e-3]))
MACHINE = Hardware(1e9, 5e8, 4e10, 0.0, 3.5e9)
ANY = st.one_of(schedules(), step_schedules())


@given(ANY, SHARED, st.booleans())
@draws(80)
def test_a_simulated_step_follows_its_waits_and_is_as_long_as_its_longest_chain(
    plan: Schedule, machine: Hardware, is_shared: bool
):
    machine = machine if is_shared else replace(machine, **ALONE)
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
    chain = [found.timeline[index] for index in band_of("plan", "", plan, found.timeline).path]
    assert found.step_s == pytest.approx(sum(timing.end_s - timing.start_s for timing in chain))
    assert all(a.position.tick < b.position.tick for a, b in pairwise(chain))
    assert all(0 <= fraction <= 1 + 1e-9 for fraction in found.busy.values())
    if not machine.is_shared:
        nearly = replace(machine, compute_beside=1 - 1e-12)
        assert nearly.is_shared
        assert plan.simulate(nearly).step_s == pytest.approx(found.step_s)


def test_updates_and_copies_share_host_memory_as_done_by_hand():
    """32 bytes a second of memory. Alone an update takes them all, and a copy 32 of them."""
    machine = Hardware(32.0, 8.0, 1.0, host_bytes_per_s=32.0)
    update, up, down = Position(0, Stream.HOST), Position(0, Stream.H2D), Position(0, Stream.D2H)
    waits: dict[Position, tuple[Position, ...]] = {update: (), up: (), down: ()}
    both = shared_timeline({update: 1.0, up: 1.0}, waits, machine)
    assert [t.end_s for t in both] == pytest.approx([2.0, 2.0])
    # 32 + 32 + 8 bytes a second are wanted at first: the copy down, which wants least, has the same part of that.
    every = shared_timeline({update: 1.0, up: 1.0, down: 1.0}, waits, machine)
    assert [t.end_s for t in every] == pytest.approx([2.25, 2.25, 2.25])
    assert shared_timeline({down: 1.0}, waits, machine)[0].end_s == 1.0


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


def test_impossible_hardware_is_refused():
    for rates in [(0, 1, 1, 0), (1, -1, 1, 0), (1, 1, 0, 0), (1, 1, 1, -1)]:
        with pytest.raises(OptionError, match=r"is not above 0|is less than 0"):
            Hardware(*rates)


# -- measured ----------------------------------------------------------------------------------------------------


def measured(plan: Schedule, machine: Hardware = MACHINE) -> Measured:
    return Measured(plan, op_durations(plan, machine))


def timed(plan: Schedule, **seconds: float) -> dict[Position, float]:
    """A millisecond for each op, but for those that are named."""
    names = {name.replace("_", "."): found for name, found in seconds.items()}
    return {p: names.get(str(op).split("@")[0], 1e-3) for p, op in plan.positions()}


def test_times_and_ops_must_fit_each_other():
    plan = schedule(trained(3))
    last, op = list(plan.positions())[-1]
    with pytest.raises(ScheduleError, match=f"^d2h:{op} at tick {last.tick} has no time"):
        Measured(plan, {p: s for p, s in timed(plan).items() if p != last})
    for seconds in (-1e-9, float("nan"), float("inf")):
        with pytest.raises(OptionError, match=r"^compute:F1 can't take "):
            Measured(plan, timed(plan, F1=seconds))
    with pytest.raises(ScheduleError, match="a time for host at tick 99, where the table has no op"):
        Measured(plan, {**timed(plan), Position(99, Stream.HOST): 1.0})


def test_another_schedule_is_refused():
    found = measured(schedule(trained(3)))
    assert schedule(trained(3)).simulate(found).step_s == schedule(trained(3)).simulate(MACHINE).step_s
    for other in (schedule(trained(4)), schedule(trained(3), transfer="bind"), schedule(trained(3), micro_batches=2)):
        with pytest.raises(ScheduleError, match=r"^the measurement is of another schedule"):
            other.simulate(found)


def spans(plan: Schedule, machine: Hardware = MACHINE) -> dict[Position, tuple[float, float]]:
    return {timing.position: (timing.start_s, timing.end_s) for timing in plan.simulate(machine).timeline}


@given(st.one_of(schedules(), step_schedules()), MACHINES, st.floats(-1e3, 1e3))
@draws(60)
def test_a_run_as_simulated_is_timed_and_measured_as_on_that_machine(plan: Schedule, machine: Hardware, zero: float):
    found = spans(plan, machine)
    run = TimedRun.of(plan, {p: (begin + zero, end + zero) for p, (begin, end) in found.items()})
    assert [t.position for t in run.timeline] == [p for p, _ in plan.positions()]
    for timing in run.timeline:
        assert (timing.start_s, timing.end_s) == pytest.approx(found[timing.position], abs=1e-9)
    assert plan.simulate(run.measured()).step_s == pytest.approx(plan.simulate(machine).step_s, abs=1e-6)
    assert run.step_s == pytest.approx(plan.simulate(machine).step_s, abs=1e-9)


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
