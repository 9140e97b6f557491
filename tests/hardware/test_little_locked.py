"""Systems that page-lock little memory: what is known of them, and what plans, doctor and a compiled model say."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import megatrain
from megatrain import Hardware
from megatrain.base import host_limits
from megatrain.device import HOST
from megatrain.hardware import hardware
from megatrain.hardware.hardware import of_weights
from megatrain.hardware.machine import usual_machine
from megatrain.hardware.measured import Link
from megatrain.scheduler.simulate import memory_limits
from megatrain.tools.sizing import doctor
from megatrain.training.compiled import printed
from tests.runtime.strict_toy import StrictToy

LIMIT = (1 << 30, "as others measured on WSL2")
MACHINE = Hardware(20e9, 16e9, 1e13, host_bytes_per_s=30e9, staged_bytes_per_s=10e9, locked_bytes=1 << 20)


def test_the_system_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert host_limits.locked_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    version = tmp_path / "proc" / "version"
    version.write_text("Linux version 6.8.0-generic (buildd@lcy02)")
    assert host_limits.locked_bytes(tmp_path) is None
    version.write_text("Linux version 5.15.153.1-microsoft-standard-WSL2 (root@941d701f84f1)")
    assert host_limits.locked_bytes(tmp_path) == LIMIT
    monkeypatch.setattr(sys, "platform", "win32")
    found = host_limits.locked_bytes(tmp_path)
    assert found is not None
    assert found[0] == psutil.virtual_memory().total // 2


def test_weights_above_the_limit_pass_through_the_ring():
    assert of_weights(MACHINE, 1 << 20) is MACHINE
    assert not MACHINE.is_staged
    staged = of_weights(MACHINE, (1 << 20) + 1)
    assert (staged.is_staged, staged.h2d_bytes_per_s, staged.d2h_bytes_per_s) == (True, 10e9, 10e9)
    assert of_weights(staged, 1 << 30) == staged
    assert memory_limits(staged) == (1.0, 1.0)  # each byte moves three times: nothing is left for updates
    assert "host memory that can be locked" in str(MACHINE)
    assert "ring" not in str(replace(MACHINE, locked_bytes=None))
    slower = of_weights(replace(MACHINE, staged_bytes_per_s=1e12), 1 << 30)
    assert slower.h2d_bytes_per_s == MACHINE.h2d_bytes_per_s  # the link itself


def planned(limit: int | None) -> megatrain.Plan:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
        example = torch.empty(1, 512)
    machine = replace(MACHINE, locked_bytes=limit)
    return megatrain.plan(model, example, hardware=machine, device_memory="8MiB", optimizer="SGD")


def test_a_plan_counts_it_and_says_so():
    plain, plenty, little = (planned(limit) for limit in (None, 1 << 30, 1 << 20))
    assert plain.step_s == plenty.step_s
    assert plenty.step_s is not None
    assert little.step_s is not None
    assert plenty.step_s < little.step_s
    assert (
        "copies: the system page-locks 1.00 MiB, less than the weights, "
        "which pass through a small locked ring: 10.0 GB/s\n"
    ) in str(little)
    assert "locked ring" not in str(plenty)


def test_the_machine_of_this_system_has_the_limit(monkeypatch: pytest.MonkeyPatch):
    device = StrictToy()
    assert usual_machine(device).locked_bytes is None
    monkeypatch.setattr(hardware, "locked_bytes", lambda: LIMIT)
    found = usual_machine(device)
    assert (found.locked_bytes, found.origins["locked_bytes"]) == LIMIT
    assert usual_machine().locked_bytes is None  # a plan for no device of this system


def test_doctor_and_a_compiled_model_say_so(monkeypatch: pytest.MonkeyPatch):
    device = StrictToy()
    (finding,) = doctor._locking(device)
    assert str(finding) == "  page-locking  256.00 MiB locked"
    compiled = megatrain.compile(nn.Linear(4, 4), device=device)
    assert "locked ring" not in str(compiled)
    for module in (doctor, printed):
        monkeypatch.setattr(module, "locked_bytes", lambda: LIMIT)
    (finding,) = doctor._locking(device)
    assert finding.is_flawed
    assert "256.00 MiB locked, 1.00 GiB in all (as others measured on WSL2)" in str(finding)
    assert "this system page-locks 1.00 GiB: larger weights pass through a small locked ring" in str(compiled)
    copies = list(doctor._rates(HOST, MACHINE))[1]
    assert "10.0 through the ring" in copies.found


def test_the_rings_rate_is_measured():
    link = Link(StrictToy())
    try:
        assert link.staged()["staged_bytes_per_s"] > 0
    finally:
        link.close()
    refusing = Link(StrictToy(limit=0))
    try:
        assert refusing.staged() == {}
    finally:
        refusing.close()
