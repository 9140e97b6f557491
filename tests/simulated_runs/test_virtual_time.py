"""Steps of the real runtime in virtual time: as long as the simulator of schedules says, no longer than they must be.

The device computes nothing here and takes only time, so sizes are those at which a card is busy.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.hardware import kernels_alone
from megatrain.hardware.hardware import Hardware
from tests.simulated_device.simulator import GIB, HardwareProfile, Simulator
from tests.simulated_device.virtual_hosts import VirtualHosts
from tests.simulated_runs.on_device import held_bytes
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


@pytest.mark.parametrize(
    ("machine", "mode"),
    [(BUS, "deferred"), pytest.param(COMPUTE, "spread", marks=pytest.mark.nightly)],
    ids=["bus", "compute"],
)
def test_a_steps_own_times_and_the_machines_rates_predict_it(
    sim: Simulator, hosts: VirtualHosts, machine: Hardware, mode: str
):
    step, batch = made(mode)
    sim.set_profile(HardwareProfile.of(machine))
    hosts.take(step, batch)
    predicted, taken = hosts.predicted(step, batch), hosts.take(step, batch)
    assert predicted == pytest.approx(taken, rel=0.05)
    assert step.schedule.simulate(machine).step_s == pytest.approx(taken, rel=0.05)


@pytest.mark.parametrize(
    ("name", "mode", "width", "rows"),
    [
        ("a100", "overlap", 1024, 256),  # few tokens: copies both ways share the link
        ("rtx-4090", "overlap", 128, 64),  # short kernels: each op waits for Python
        *(pytest.param(name, "deferred", 4 * WIDTH, ROWS, marks=pytest.mark.nightly) for name in Hardware.presets()),
    ],
)
def test_rates_alone_predict_steps_within_5_percent(sim: Simulator, name: str, mode: str, width: int, rows: int):
    machine = Hardware.preset(name)
    sim.configure(compute=False, poison=False)
    hosts = VirtualHosts(sim, machine.host_bytes_per_s, machine.op_s, machine.update_s)
    step, batch = made(mode, 12, width, rows)
    sim.set_profile(HardwareProfile.of(machine))
    hosts.take(step, batch)
    taken = hosts.take(step, batch)
    assert step.schedule.simulate(machine).step_s == pytest.approx(taken, rel=0.05)


@pytest.mark.parametrize(
    ("machine", "busy", "mode"),
    [
        (BUS, {"h2d", "d2h"}, "deferred"),
        pytest.param(COMPUTE, {"compute"}, "overlap", marks=pytest.mark.nightly),
    ],
    ids=["bus", "compute"],
)
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


def test_measuring_a_machine_finds_its_rates(sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An A100, whose copies both ways share the link."""
    # Python's real time for an op, which the measurement takes off: the device's clock doesn't count it.
    monkeypatch.setattr(kernels_alone, "op_s", lambda: 0.0)
    held_bytes()
    reserved = torch.accelerator.memory_reserved()
    sim.configure(compute=False, poison=False, capacity=64 * GIB)
    given = replace(Hardware.preset("a100"), issue_s=8e-6)  # each launch takes as long there, alone and in a layer
    sim.set_profile(HardwareProfile.of(given))
    found = Hardware.measure("sim", cache=tmp_path)
    for kind, tolerance in (("bf16", 0.03), ("fp32", 0.03), ("bf16 attention", 0.15)):
        assert found.product_rate(kind) == pytest.approx(given.product_rate(kind), rel=tolerance)
    for rate in ("memory_bytes_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s", "launch_s", "issue_s"):
        assert getattr(found, rate) == pytest.approx(getattr(given, rate), rel=0.05), rate
    both, wanted = (m.h2d_beside * m.h2d_bytes_per_s + m.d2h_beside * m.d2h_bytes_per_s for m in (found, given))
    assert both == pytest.approx(wanted, rel=0.05)  # the device gives what copies lose to the later one
    assert found.memory_bytes == torch.accelerator.get_memory_info()[1] == 64 * GIB
    assert torch.accelerator.memory_reserved() == reserved
    assert (found.name, found.compute_beside) == ("sim:0", 1)
