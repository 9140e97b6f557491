"""Optimizer state in a file, on a device whose streams run in any order: the bits of state in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import choose
from tests.simulated_runs.test_device_updates import CLIPPED, NO_NORM, REPORTED, Training, assert_same, busy

FILE: Mapping[str, Any] = {"offload": Path(__file__).parent}


@pytest.mark.parametrize(
    ("precision", "count", "norm"),
    [
        ("bf16", 2, NO_NORM),
        pytest.param("bf16", 1, CLIPPED, marks=pytest.mark.nightly),
        pytest.param("fp32", 1, REPORTED, marks=pytest.mark.nightly),
    ],
)
def test_steps_have_the_bits_of_state_in_memory_in_any_order(
    sim: Simulator, precision: str, count: int, norm: Mapping[str, Any]
):
    memory = Training(is_there=False, precision=precision, norm=norm)
    expected = [(memory.take(number, count=count), memory.grad_norm) for number in range(4)]
    for seed, order in enumerate(("late", "seeded")):
        file = Training(precision=precision, norm={**norm, **FILE})
        choose(sim, order, file.compiled, seed)
        found = [(file.take(number, count=count), file.grad_norm) for number in range(4)]
        choose(sim, "early")
        assert found == expected
        assert_same(file.state(), memory.state())
        assert set(file.there) == {()}, "the device has room, and updates nothing"


@pytest.mark.nightly
def test_looks_writes_freezing_and_checkpoints_change_nothing(sim: Simulator, tmp_path: Path):
    memory, file = Training(is_there=False, norm=CLIPPED), Training(norm={**CLIPPED, **FILE})
    expected, _ = busy(memory, tmp_path / "memory")
    found, _ = busy(file, tmp_path / "file")
    assert_same(found, expected)
    assert_same(file.state(), memory.state())
