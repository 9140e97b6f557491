"""What a control group leaves of the machine's memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatrain.memory.available import available_bytes
from megatrain.memory.heap import return_free_memory

MACHINE = 1 << 40


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=MACHINE))


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def version_2(root: Path, group: str, most: object, used: int, reclaimable: int = 0) -> None:
    folder = root / "sys/fs/cgroup" / group
    write(folder / "memory.max", most)
    write(folder / "memory.current", used)
    write(folder / "memory.stat", f"anon 5\ninactive_file {reclaimable}")


def version_1(root: Path, group: str, most: int, used: int, reclaimable: int = 0) -> None:
    folder = root / "sys/fs/cgroup/memory" / group
    write(folder / "memory.limit_in_bytes", most)
    write(folder / "memory.usage_in_bytes", used)
    write(folder / "memory.stat", f"inactive_file 7\ntotal_inactive_file {reclaimable}")


def test_without_control_groups_it_is_the_machines(tmp_path: Path):
    assert available_bytes(tmp_path) == MACHINE


def test_the_lowest_of_all_groups_above_counts_and_pages_of_files_are_free(tmp_path: Path):
    write(tmp_path / "proc/self/cgroup", "0::/jobs/mine")
    version_2(tmp_path, "jobs/mine", 1000, 600)
    assert available_bytes(tmp_path) == 400
    version_2(tmp_path, "jobs", 2000, 1900)
    assert available_bytes(tmp_path) == 100
    version_2(tmp_path, "jobs", 2000, 1900, reclaimable=50)
    assert available_bytes(tmp_path) == 150
    version_2(tmp_path, "jobs", "max", 1900)
    assert available_bytes(tmp_path) == 400


def test_the_first_version_of_control_groups_counts_too(tmp_path: Path):
    write(tmp_path / "proc/self/cgroup", "9:cpu,cpuacct:/a\n4:memory:/jobs/mine\n1:name=systemd:/\n0::/")
    version_1(tmp_path, "jobs/mine", 5000, 1000, reclaimable=30)
    version_1(tmp_path, "a", 1, 0)  # of another controller
    assert available_bytes(tmp_path) == 4030
    version_1(tmp_path, "", 9223372036854771712, 1000)  # how that version says that there is no limit
    assert available_bytes(tmp_path) == 4030


def test_in_a_container_the_own_path_may_be_missing(tmp_path: Path):
    write(tmp_path / "proc/self/cgroup", "0::/docker/0123")
    version_2(tmp_path, "", 700, 800)
    assert available_bytes(tmp_path) == 0


def test_this_machines_files_can_be_read():
    assert 0 < available_bytes() <= MACHINE
    return_free_memory()
