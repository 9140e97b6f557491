"""Bands: the plan is the simulation, and the verdict is what the simulation says of other machines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from megatrain.reporting.figures import compared
from megatrain.scheduler.bands import GAPS, Band, band_of
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.simulate import Hardware, TimedRun
from tests.draws import draws
from tests.reporting.steps import drawn, made, small

RATES = st.floats(1e2, 1e6)
MACHINES = st.builds(Hardware, RATES, RATES, RATES, st.just(0.0), RATES)
RATE_OF = {"h2d": "h2d_bytes_per_s", "d2h": "d2h_bytes_per_s", "compute": "flops_per_s", "host": "host_bytes_per_s"}


def planned(plan: Schedule, machine: Hardware) -> Band:
    return band_of("plan", "", plan, plan.simulate(machine).timeline)


def assert_whole(band: Band) -> None:
    """The path leads from an op that waits for nothing to the last one, and all of the step is somebody's."""
    if band.step_s > 0:
        assert sum(band.shares.values()) == pytest.approx(1)
        assert list(band.shares.values()) == sorted(band.shares.values(), reverse=True)
        assert band.timeline[band.path[-1]].end_s == band.step_s
    assert [band.follows[index] for index in band.path] == [None, *band.path[:-1]]


@given(drawn(), MACHINES)
@draws(60)
def test_the_plan_is_the_simulation(plan: Schedule, machine: Hardware):
    simulation = plan.simulate(machine)
    band = planned(plan, machine)
    assert band.step_s == pytest.approx(simulation.step_s)
    assert dict(band.busy) == {s: pytest.approx(part) for s, part in simulation.busy.items() if part > 0}
    assert band.shares.get(GAPS, 0.0) == pytest.approx(0, abs=1e-9)
    assert_whole(band)


@given(drawn(), st.builds(Hardware, RATES, RATES, RATES))
@draws(60)
def test_the_next_bottleneck_is_that_of_a_machine_whose_bound_takes_no_time(plan: Schedule, machine: Hardware):
    """Of one whose streams don't slow each other down."""
    band = planned(plan, machine)
    if not band.shares or plan.device_updates:  # which compute does at the rate of its memory
        return
    bound = next(iter(band.shares))
    without = planned(plan, replace(machine, **{RATE_OF[bound]: float("inf")}))
    assert (band.then is None) == (without.step_s == 0)
    if band.then is not None:
        assert band.then.step_s == pytest.approx(without.step_s)
        assert without.shares[band.then.name] == pytest.approx(max(without.shares.values()))


@given(drawn(), MACHINES, st.randoms(use_true_random=False))
@draws(60)
def test_time_between_measured_ops_belongs_to_no_stream(plan: Schedule, machine: Hardware, dice):
    """Each op begins late and ends early within the time that it had in the simulation."""
    spans = {}
    for timing in plan.simulate(machine).timeline:
        lasts = timing.end_s - timing.start_s
        spans[timing.position] = timing.start_s + lasts * dice.choice([0, 0.25]), timing.end_s
    run = TimedRun.of(plan, spans)
    band = band_of("measured", "", plan, run.timeline)
    assert_whole(band)
    path = [band.timeline[index] for index in band.path]
    gaps = band.step_s - sum(timing.end_s - timing.start_s for timing in path)
    assert band.shares.get(GAPS, 0.0) == pytest.approx(gaps / band.step_s if band.step_s else 0, abs=1e-9)


class TestWords(TestCase):
    def test_what_bounds_the_step(self) -> None:
        self.assertExpectedInline(
            str(made()).rpartition("\n")[0],
            """\
report: schedule, 4 blocks, 19 ticks, 38 ops
  plan: 355 us a step, bound by compute 92% of the time (host 5%, d2h 2%, h2d 2%)
    the next bottleneck is host: without the time of compute a step would take 98.3 us
  measured: 443 us a step, bound by compute 88% of the time (host 4%, the time between ops 4%, d2h 2%, h2d 2%)
    the next bottleneck is host: without the time of compute a step would take 122 us
  the measured step took 25% longer than the plan
  peak: 721.25 KiB at B2.1 (tick 12), 36% for weights, the largest weights of block 1 (layers.1)""",
        )

    def test_a_step_that_takes_no_time(self) -> None:
        free = Hardware(float("inf"), float("inf"), float("inf"))
        self.assertExpectedInline(planned(small(), free).words(), """plan: a step takes no time""")

    def test_a_step_of_one_stream(self) -> None:
        only = Hardware(float("inf"), float("inf"), 1e11)
        self.assertExpectedInline(
            planned(small(), only).words().replace("; ", "\n"),
            """\
plan: 300 us a step, bound by compute 100% of the time
nothing else bounds it""",
        )


@pytest.mark.parametrize(
    ("measured_s", "words"),
    [
        (0.5, "50% shorter than the plan"),
        (0.998, "as long as the plan"),
        (1.3, "30% longer than the plan"),
        (4.25, "4.25 times as long as the plan"),
    ],
)
def test_the_measured_step_is_compared_with_the_plan(measured_s: float, words: str):
    assert compared(measured_s, 1.0) == words
