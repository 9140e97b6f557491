"""How many threads update: the processors that this process really has, less those of the threads that launch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import megatrain
from megatrain.base.host_limits import update_threads
from megatrain.device import Accelerator, Cpu, Device
from megatrain.training.setup import Setup


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(128)), raising=False)


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_processors_are_left_but_no_more_than_half(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for count, one, three in ((1, 1, 1), (2, 1, 1), (4, 3, 2), (6, 5, 3), (16, 15, 13)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, n=count: set(range(n)), raising=False)
        assert (update_threads(1, tmp_path), update_threads(3, tmp_path)) == (one, three)
        assert update_threads(0, tmp_path) == count


@pytest.mark.usefixtures("processors")
def test_the_quota_of_a_container_counts(tmp_path: Path):
    write(tmp_path / "proc/self/cgroup", "0::/kubepods/mine")
    group = tmp_path / "sys/fs/cgroup/kubepods/mine"
    assert update_threads(3, tmp_path) == 125
    for text, threads in (("max 100000", 125), ("1600000 100000", 13), ("50000 100000", 1), ("150000 100000", 1)):
        write(group / "cpu.max", text)
        assert update_threads(3, tmp_path) == threads
    for broken in ("", "many 100000", "100000 0", "100000"):
        write(group / "cpu.max", broken)
        assert update_threads(3, tmp_path) == 125


@pytest.mark.parametrize(("device", "left"), [(Accelerator("xpu", 0), 3), (Device(torch.device("xpu"), "plain"), 1)])
def test_updates_leave_the_threads_that_launch_their_processors(
    monkeypatch: pytest.MonkeyPatch, device: Device, left: int
):
    monkeypatch.setattr("megatrain.training.setup.update_threads", lambda leave: -leave)
    compiled = megatrain.compile(nn.Linear(2, 2), device="cpu").megatrain
    optimizers = [torch.optim.SGD(compiled.model.parameters())]
    step = Setup(compiled, optimizers, max_norm=None, overlap=True, spread=False, needs_norm=False)
    assert step.threads == torch.get_num_threads()
    object.__setattr__(compiled.options, "device", device)
    assert step.threads == -left
    assert Cpu().launching_threads == 1
