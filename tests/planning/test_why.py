"""plan.why(): its figures are the plan's own, and those of the plan with 1 GiB more."""

from __future__ import annotations

from megatrain.planning.bands import format_s
from megatrain.planning.plan_text import band_of
from megatrain.sizes import format_bytes
from tests.planning.steps import planned


def test_the_figures_are_those_of_the_plan():
    plan = planned()
    simulation, text = plan.simulation, plan.why()
    assert simulation is not None
    lines = text.splitlines()
    assert lines[0].startswith(
        f"On rtx-4090 a step takes {format_s(simulation.step_s)}, {64 / simulation.step_s:.0f} tokens/s. "
    )
    band = band_of(plan)
    assert abs(band.step_s - simulation.step_s) < 1e-9
    assert f"It is bound by {next(iter(band.shares))}, " in lines[0]
    assert band.then is not None
    assert f"would take {format_s(band.then.step_s)}, bound by {band.then.name}." in lines[0]
    bound = plan.lower_bound
    assert bound is not None
    above = f"{simulation.step_s / bound.seconds - 1:.1%}"
    least = f"No plan of these blocks in 600.00 KiB takes less than {format_s(bound.seconds)} ({bound.reason}): "
    assert lines[0].endswith(f"{least}this one takes {above} more.")
    assert f"The device's peak is {format_bytes(plan.schedule.device_bytes)} at B" in text
    assert f"The graphs of {len(plan.schedule.saves)} of 5 blocks are retained" in text
    assert f"The host holds {format_bytes(plan.host.total_bytes)}, " in text


def test_the_next_gib_is_planned():
    plan, more = planned(), planned(device_memory=f"{2**20 + 600}KiB")
    (line,) = (line for line in plan.why().splitlines() if line.startswith("With 1 GiB more"))
    assert plan.simulation is not None
    assert more.simulation is not None
    assert f"{len(more.schedule.saves)} retained graphs in place of {len(plan.schedule.saves)}" in line
    gain = 1 - more.simulation.step_s / plan.simulation.step_s
    assert f"a step would take {format_s(more.simulation.step_s)}, {gain:.1%} less." in line
    ample = planned(device_memory="1GiB").why()
    assert "With 1 GiB more of the device nothing would change." in ample
    assert "isn't bounded" in planned(device_memory=None).why()
    assert "No plan of these blocks takes less than " in planned(device_memory=None).why()
    too_small = planned(device_memory="64KiB")
    assert too_small.lower_bound is None
    assert "With 1 GiB more of the device the step would fit." in too_small.why()


def test_without_a_machine_no_time_is_said():
    text = planned(hardware=None).why()
    assert text.startswith("No time is known without hardware=")
    assert "tokens/s" not in text
