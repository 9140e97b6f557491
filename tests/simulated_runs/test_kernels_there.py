"""kernels="auto": of eager's kernels and recorded ones those run whose plan is shorter, with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.hardware.hardware import Hardware
from megatrain.runtime.replays import Replays
from tests.comparing import assert_same
from tests.equal_blocks import EqualBlocks
from tests.simulated_runs.on_device import DEVICE
from tests.training.parity import adamw

pytestmark = pytest.mark.usefixtures("sim")
FEW = Hardware(25e9, 25e9, {"fp32": 2e13}, issue_s=20e-6, memory_bytes_per_s=1e12, name="short kernels")
MANY = Hardware(25e9, 25e9, {"fp32": 1e8}, issue_s=20e-6, memory_bytes_per_s=1e7, name="long kernels")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the templates of all recordings, in order."""
    found: list[str] = []
    recorded = Replays._recorded
    monkeypatch.setattr(Replays, "_recorded", lambda self, *given: found.append(self._name) or recorded(self, *given))
    return found


class Blocks(EqualBlocks):
    """Of as many kernels as those of a layer."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__(depth, extra=_Chain())


class _Chain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = x.tanh() + x * 0.1
        return x


def batch(seed: int, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def compiled_of(**options: Any) -> megatrain.CompiledModule:
    torch.manual_seed(0)
    return megatrain.compile(Blocks(), device=DEVICE, **options)


def step_of(compiled: megatrain.CompiledModule) -> megatrain.TrainStep:
    return megatrain.TrainStep(compiled, adamw(compiled), loss=lambda y, _: y.square().mean())


def test_a_shape_is_recorded_from_its_third_run_on_with_eagers_bits(made: list[str]):
    found: list[Any] = []
    for options in ({"kernels": "eager"}, {}):
        compiled = compiled_of(**options)
        step = step_of(compiled)
        found.append([step(batch(seed)).item() for seed in range(2)])
        assert made == []
        assert step.schedule.recorded == ()
        found[-1] += [step(batch(seed)).item() for seed in range(2, 5)]
        step.flush()
        found[-1] += [p.detach().clone() for p in compiled.parameters()]
    assert_same(found[0], found[1])
    assert made
    assert len(step.schedule.recorded) >= 3
    assert "kernels of steps: recorded in" in str(compiled)
    count = len(made)
    step(batch(5, rows=16))
    assert len(made) == count
    assert "one by one until run 3 of this shape" in str(compiled)


def test_kernels_that_take_longer_than_their_launches_are_launched_one_by_one(made: list[str]):
    compiled = compiled_of(hardware=MANY)
    step = step_of(compiled)
    for seed in range(4):
        step(batch(seed))
    assert made == []
    assert "kernels of steps: one by one: recorded, the step would be no shorter" in str(compiled)


def test_a_budget_without_room_for_recordings_is_still_one_of_eagers_kernels(made: list[str]):
    """With the least memory in which eager's kernels run."""
    options = {"activations": "offload", "chunking": "never"}
    eager = compiled_of(**options, kernels="eager")
    least = step_of(eager).prepare(batch(0)).device_bytes
    compiled = compiled_of(**options, memory=least, hardware=FEW)
    step = step_of(compiled)
    for seed in range(4):
        step(batch(seed))
    assert made == []
    assert "one by one: what recordings hold leaves too little memory" in str(compiled)


def test_recordings_give_way_to_a_shape_that_needs_their_memory(made: list[str]):
    memory = step_of(compiled_of(activations="recompute", kernels="eager")).prepare(batch(0, 64)).device_bytes
    compiled = compiled_of(memory=memory, hardware=FEW)
    step = step_of(compiled)
    wanted = [step_of(compiled_of(memory=memory, kernels="eager"))]
    sizes = [8, 8, 8, 8, 64, 8, 8]
    losses = [[each(batch(number, rows)).item() for number, rows in enumerate(sizes)] for each in (step, *wanted)]
    assert losses[0] == losses[1]
    assert made
    count = len(made)
    step(batch(9))
    assert len(made) == count
    assert "one by one: another shape, or a call, needed the memory of recordings" in str(compiled)


def test_a_recording_that_fails_leaves_the_plan_of_eagers_kernels(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    compiled = compiled_of()
    step = step_of(compiled)
    saves: list[int] = []
    monkeypatch.setattr(Replays, "_recorded", fails)
    for seed in range(4):
        step(batch(seed))
        saves.append(len(step.schedule.saves))
    assert saves[2] < saves[0] == saves[3]
    assert "one by one: operation not permitted when stream is capturing" in str(compiled)
