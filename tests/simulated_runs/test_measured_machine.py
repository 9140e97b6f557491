"""Microbenchmarks on the simulated device, in virtual time: they find the rates of its profile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain.hardware.hardware import Hardware
from tests.simulated_device.simulator import GIB, HardwareProfile, Simulator


@pytest.mark.parametrize("name", ["rtx-4090", "a100", "gb10"])
def test_measuring_a_machine_finds_its_rates(sim: Simulator, tmp_path: Path, name: str):
    sim.configure(compute=False, poison=False, capacity=64 * GIB)
    given = Hardware.preset(name)
    sim.set_profile(HardwareProfile.of(given))
    found = Hardware.measure("sim", cache=tmp_path)
    assert found.product_rate("bf16") == pytest.approx(given.product_rate("bf16"), rel=0.03)
    assert found.product_rate("fp32") == pytest.approx(given.product_rate("fp32"), rel=0.03)
    assert found.product_rate("bf16 attention") == pytest.approx(given.product_rate("bf16"), rel=0.15)
    assert found.memory_bytes_per_s == pytest.approx(given.memory_bytes_per_s, rel=0.03)
    assert found.h2d_bytes_per_s == pytest.approx(given.h2d_bytes_per_s, rel=0.03)
    assert found.d2h_bytes_per_s == pytest.approx(given.d2h_bytes_per_s, rel=0.03)
    assert found.launch_s == pytest.approx(given.launch_s, rel=0.05)
    assert found.issue_s == pytest.approx(given.issue_s, rel=0.05)
    both, wanted = (m.h2d_beside * m.h2d_bytes_per_s + m.d2h_beside * m.d2h_bytes_per_s for m in (found, given))
    assert both == pytest.approx(wanted, rel=0.05)  # the device gives what copies lose to the later one
    assert found.memory_bytes == torch.accelerator.get_memory_info()[1] == 64 * GIB
    assert torch.accelerator.memory_reserved() == 0
    assert found.name == "sim:0"
    assert found.compute_beside == 1
