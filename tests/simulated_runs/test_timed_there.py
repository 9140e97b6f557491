"""TrainStep.time on an accelerator: events of its streams, in the order and the virtual time of its work."""

from __future__ import annotations

import pytest

from megatrain.scheduler.items import Stream
from tests.simulated_device.simulator import HardwareProfile, Simulator
from tests.simulated_runs.test_launching import batches, on_launching_threads, stepping
from tests.simulated_runs.test_virtual_steps import made
from tests.training.parity import MODES, TASKS

H2D = 1e9
BUS = HardwareProfile(
    fp32=2e13, h2d=H2D, d2h=2e9, memory=1e12, launch=2e-6, issue=5e-6, control=1e-6, sync=5e-6, pageable=5e9
)


def test_copies_take_the_time_of_the_bus(sim: Simulator):
    sim.configure(compute=False, poison=False)
    step, batch = made("overlap")
    sim.set_profile(BUS)
    run = step.time(batch)
    ops = dict(run.schedule.positions())
    works = run.schedule.known_workload().blocks
    seen = 0
    for timing in run.timeline:
        op = ops[timing.position]
        rate = {("W", Stream.H2D): H2D, ("G", Stream.D2H): 2e9}.get((op.what, op.stream))
        if rate is not None:
            nbytes = works[op.block].state_bytes if op.what == "W" else works[op.block].gradient_bytes
            assert timing.end_s - timing.start_s == pytest.approx(nbytes / rate, rel=0.1)
            seen += 1
    assert seen >= 2 * len(works)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_waits_for_a_time(sim: Simulator, mode: str):
    """The launching thread waits once, when the clocks are set, and at the end for the events."""
    _, step = stepping("gpt", mode, TASKS["gpt"].build())
    for number in range(2):
        step(batches("gpt", number, 2))
    with sim.synchronizations() as plain:
        step(batches("gpt", 2, 2))
    with sim.synchronizations() as found:
        run = step.time(batches("gpt", 3, 2))
    own = [one for one in found if any(frame.filename.endswith("stopwatch.py") for frame in one.stack[-2:])]
    assert len(on_launching_threads(found)) - len(on_launching_threads(plain)) == len(own)
    assert not any(one.thread.startswith("megatrain-") for one in own)
    ends = {timing.position: timing.end_s for timing in run.timeline}
    on_device = {Stream.H2D, Stream.COMPUTE, Stream.D2H}
    for timing in run.timeline:
        for wait in step.schedule.waits()[timing.position]:
            if {wait.stream, timing.position.stream} <= on_device:
                assert ends[wait] <= timing.start_s + 1e-5, (timing, wait)
