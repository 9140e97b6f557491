"""Optimizer state in a file, on a device whose streams run in any order: the bits of state in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize("norm", [NO_NORM, pytest.param(CLIPPED, marks=pytest.mark.nightly)])
def test_state_goes_from_the_device_to_the_file_and_back_in_any_order(sim: Simulator, norm: Mapping[str, Any]):
    """With room for all state there is the device's; then a part is in the file, all of it, a part, and none."""
    memory, file = Training(is_there=False, norm=norm), Training(norm={**norm, **FILE, "host_memory": "1TiB"})
    tables, moved = file.step._setup.tables, list[int]()
    for number, (order, least) in enumerate([("late", 0), ("seeded", 1), ("early", 1 << 60), ("late", 1), ("late", 0)]):
        tables._limits = replace(tables._limits, least_filed_bytes=least)
        choose(sim, order, file.compiled, number)
        for each in (2 * number, 2 * number + 1):
            assert torch.equal(memory.take(each, count=2), file.take(each, count=2))
        moved.append(sum(op.what == "R" for op in file.step.schedule.ops))
        assert bool(file.there[-1]) == (not moved[-1]), "the device has room"
        if order != "late":  # else what is seen of the device's is copied there again
            assert_same(file.state(), memory.state())
    choose(sim, "early")
    assert_same(file.state(), memory.state())
    assert moved == [0, 3, 4, 3, 0]


@pytest.mark.nightly
def test_looks_writes_freezing_and_checkpoints_change_nothing(sim: Simulator, tmp_path: Path):
    memory, file = Training(is_there=False, norm=CLIPPED), Training(norm={**CLIPPED, **FILE})
    expected, _ = busy(memory, tmp_path / "memory")
    found, _ = busy(file, tmp_path / "file")
    assert_same(found, expected)
    assert_same(file.state(), memory.state())
