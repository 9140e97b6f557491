"""Steps of the real runtime in virtual time: as long as the simulator of schedules says, no longer than they must be.

The device computes nothing here and takes only time, so sizes are those at which a card is busy.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.items import Stream
from tests.simulated_device.simulator import HardwareProfile, Simulator
from tests.simulated_device.virtual_hosts import VirtualHosts
from tests.tiers import diagonal
from tests.training.parity import MODES

WIDTH, ROWS = 512, 4096
# Launches cost something, but less than the work: issuing the smallest kernel takes a fifth of its time.
HOST_BYTES_PER_S = 100e9
_COMMON: dict[str, Any] = {
    "launch_s": 2e-6,
    "host_bytes_per_s": HOST_BYTES_PER_S,
    "memory_bytes_per_s": 1e12,
    "issue_s": 5e-6,
}
COMPUTE = Hardware(25e9, 25e9, {"fp32": 2e12}, **_COMMON)
BUS = Hardware(1e9, 1e9, {"fp32": 2e13}, **_COMMON)


class Blocks(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def made(
    mode: str, depth: int = 12, width: int = WIDTH, rows: int = ROWS
) -> tuple[megatrain.TrainStep, list[torch.Tensor]]:
    compiled = megatrain.compile(Blocks(depth, width), device="sim", activations="recompute")
    optimizer = torch.optim.AdamW(compiled.parameters(), fused=True)
    step = megatrain.TrainStep(compiled, optimizer, **MODES[mode])
    batch = [torch.empty(rows, width, device="sim") for _ in range(2)]
    for _ in range(2):
        step(batch)
    return step, batch


@pytest.fixture
def hosts(sim: Simulator) -> VirtualHosts:
    sim.configure(compute=False, poison=False)
    return VirtualHosts(sim, HOST_BYTES_PER_S)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("machine", [COMPUTE, BUS], ids=["compute", "bus"])
def test_the_simulator_of_schedules_is_right_within_5_percent(
    sim: Simulator, hosts: VirtualHosts, machine: Hardware, mode: str
):
    step, batch = made(mode)
    sim.set_profile(HardwareProfile.of(machine))
    hosts.take(step, batch)
    predicted, taken = hosts.predicted(step, batch), hosts.take(step, batch)
    assert predicted == pytest.approx(taken, rel=0.05)
    assert step.schedule.simulate(machine).step_s == pytest.approx(taken, rel=0.05)


@pytest.mark.wide
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", Hardware.presets())
def test_the_simulator_of_schedules_is_right_within_5_percent_for_each_machine(sim: Simulator, name: str, mode: str):
    """By the times of a step, and by the machine's rates alone. Only layers of this width take longer than launches."""
    machine = Hardware.preset(name)
    sim.configure(compute=False, poison=False)
    hosts, (step, batch) = VirtualHosts(sim, machine.host_bytes_per_s, machine.op_s), made(mode, width=4 * WIDTH)
    sim.set_profile(HardwareProfile.of(machine))
    hosts.take(step, batch)
    predicted, taken = hosts.predicted(step, batch), hosts.take(step, batch)
    assert predicted == pytest.approx(taken, rel=0.05)
    assert step.schedule.simulate(machine).step_s == pytest.approx(taken, rel=0.05)


@pytest.mark.parametrize(("name", "mode"), diagonal(["a100", "rtx-4090", "gh200"], ["overlap", "serial_clipped"]))
@pytest.mark.parametrize(("width", "rows"), [(1024, 256), (128, 64)], ids=["bus", "launches"])
def test_rates_predict_steps_that_the_link_or_python_holds_up(
    sim: Simulator, name: str, mode: str, width: int, rows: int
):
    """Few tokens: copies both ways share the link, as an A100's do. Short kernels: each op waits for Python."""
    machine = Hardware.preset(name)
    sim.configure(compute=False, poison=False)
    hosts, (step, batch) = VirtualHosts(sim, machine.host_bytes_per_s, machine.op_s), made(mode, 12, width, rows)
    sim.set_profile(HardwareProfile.of(machine))
    hosts.take(step, batch)
    taken = hosts.take(step, batch)
    assert step.schedule.simulate(machine).step_s == pytest.approx(taken, rel=0.05)


@pytest.mark.parametrize("mode", ["overlap", "deferred"])
@pytest.mark.parametrize(("machine", "busy"), [(COMPUTE, {"compute"}), (BUS, {"h2d", "d2h"})], ids=["compute", "bus"])
def test_a_step_takes_as_long_as_what_holds_it_up(
    sim: Simulator, hosts: VirtualHosts, machine: Hardware, busy: set[str], mode: str
):
    """If the bus does, the forward waits for its weights, and the backward for its gradients to leave."""
    step, batch = made(mode, depth=40)  # its first copy and last update are short beside the rest
    assert len(step.schedule.resident()) == 40
    sim.set_profile(HardwareProfile.of(machine))
    hosts.take(step, batch)
    with sim.spans() as spans:
        taken = hosts.take(step, batch)
    names = [(span.name if span.name in ("h2d", "d2h") else "compute", span.end - span.begin) for span in spans]
    sums = {name: sum(seconds for known, seconds in names if known == name) for name, _ in names}
    bound = sum(sums[name] for name in busy)
    assert bound <= taken <= 1.05 * bound, sums


@pytest.mark.parametrize("mode", ["serial", "serial_clipped"])
def test_serial_updates_add_their_own_time(sim: Simulator, mode: str):
    sim.configure(compute=False, poison=False)
    hosts, step, batch = VirtualHosts(sim, HOST_BYTES_PER_S / 10), *made(mode)
    sim.set_profile(HardwareProfile.of(COMPUTE))
    hosts.take(step, batch)
    with sim.spans() as spans:
        taken = hosts.take(step, batch)
    compute = sum(span.end - span.begin for span in spans if span.name not in ("h2d", "d2h"))
    updates = 10 * hosts.moved_bytes(Stream.HOST, "U") / HOST_BYTES_PER_S
    assert updates > 0.01 * compute
    assert compute + updates <= taken <= 1.05 * (compute + updates)
