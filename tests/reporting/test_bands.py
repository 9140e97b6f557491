"""Bands: the plan is the simulation, and the verdict is what the simulation says of other machines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.scheduler.bands import GAPS, Band, band_of
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.simulate import Hardware
from megatrain.tools.reporting.figures import compared
from tests.draws import draws
from tests.reporting.steps import drawn

RATES = st.floats(1e2, 1e6)
MACHINES = st.builds(Hardware, RATES, RATES, RATES, st.just(0.0), RATES)


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
    band = band_of("plan", "", plan, simulation.timeline)
    assert band.step_s == pytest.approx(simulation.step_s)
    assert dict(band.busy) == {s: pytest.approx(part) for s, part in simulation.busy.items() if part > 0}
    assert band.shares.get(GAPS, 0.0) == pytest.approx(0, abs=1e-9)
    assert_whole(band)


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
