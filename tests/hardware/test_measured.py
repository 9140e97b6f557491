"""What was measured: read where it fits, measured anew where it doesn't; and how it is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.base.native.native_kernel import LANES
from megatrain.hardware import measured
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.measured import cached, elements_beyond

FIGURES = {"h2d_bytes_per_s": 1e9, "d2h_bytes_per_s": 2e9, "flops_per_s": {"fp32": 1e12}, "memory_bytes": 2**30}

WRONG = {
    "h2d_bytes_per_s": -1.0,
    "flops_per_s": {"fp32": float("nan")},
    "d2h_bytes_per_s": "fast",
    "no_such_figure": 1.0,
}


class Measured:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> dict[str, object]:
        self.times += 1
        return dict(FIGURES)


def kept(folder: Path, facts: str, measure: Measured, *, fresh: bool = False):
    return cached(folder, facts, measure, accept=Hardware, fresh=fresh)


def test_what_was_measured_is_read(tmp_path: Path):
    measure = Measured()
    folder = tmp_path / "new" / "cache"
    assert kept(folder, "a machine", measure) == kept(folder, "a machine", measure) == FIGURES
    assert measure.times == 1
    kept(folder, "another machine", measure)
    assert measure.times == 2
    kept(folder, "a machine", measure, fresh=True)
    assert measure.times == 3
    assert [path.suffix for path in folder.iterdir()] == [".json", ".json"]


KEPT = {"format": 6, "facts": "a machine", "figures": FIGURES}


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "[" * 100_000),
        json.dumps(KEPT | {"format": 1}),
        json.dumps(KEPT | {"facts": "an older driver"}),
        *(json.dumps(KEPT | {"figures": {**FIGURES, name: value}}) for name, value in WRONG.items()),
        json.dumps(KEPT | {"figures": {}}),
    ],
)
def test_a_file_that_is_broken_or_of_other_facts_is_measured_anew(tmp_path: Path, text: str):
    measure = Measured()
    kept(tmp_path, "a machine", measure)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert kept(tmp_path, "a machine", measure) == FIGURES
    assert measure.times == 2
    assert json.loads(file.read_text())["figures"] == FIGURES


def test_the_figures_say_that_they_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measured, "_measured", lambda device: {**FIGURES, "name": "cpu"})
    machine = Hardware.measure("cpu", cache=tmp_path)
    assert machine.h2d_bytes_per_s == 1e9
    assert all(line.endswith("measured") for line in str(machine).splitlines()[1:])
    monkeypatch.setattr(measured, "_measured", lambda device: pytest.fail("measured again"))
    assert Hardware.measure("cpu", cache=tmp_path) == machine
    with pytest.raises(pytest.fail.Exception):
        Hardware.measure("cpu", cache=tmp_path, fresh=True)


@pytest.mark.nightly
def test_this_machine_has_figures(tmp_path: Path):
    machine = Hardware.measure("cpu", cache=tmp_path)
    assert machine.issue_s == 0  # a kernel is done when its call returns
    assert 0 < machine.compute_beside <= 1
    assert machine.host_bytes_per_s < 1e13
    assert machine.memory_bytes is not None


GIB = 1 << 30


@pytest.mark.parametrize(
    ("caches", "available", "nbytes"),
    [
        (0, 64 * GIB, 256 << 20),
        (32 << 20, 64 * GIB, 256 << 20),
        (300 << 20, 64 * GIB, 1200 << 20),
        (300 << 20, 4 * GIB, 512 << 20),
        (300 << 20, GIB, 256 << 20),
        (2 * GIB, 900 * GIB, 4 * GIB),
    ],
)
def test_updates_are_measured_on_memory_that_no_cache_holds(caches: int, available: int, nbytes: int):
    number = elements_beyond(caches, available)
    assert number * 16 == nbytes
    assert number % LANES == 0
