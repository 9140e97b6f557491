"""A simulated device with too little memory: the budget knows what is free, and a step leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatrain
from megatrain.device import find
from megatrain.memory.out_of_memory import DeviceMemoryError
from tests.simulated_device.simulator import Simulator
from tests.training.parity import adamw, assert_same, snapshot

MIB = 1 << 20


def square(result: torch.Tensor, _: Any) -> torch.Tensor:
    return result.square().mean()


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_without_room_leaves_no_trace_and_the_next_one_runs(sim: Simulator, clip: float | None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    optimizer, small, wide = adamw(model), torch.randn(16, 64).to("sim"), torch.randn(16384, 64).to("sim")
    compiled = megatrain.compile(model, device="sim", memory="60MiB", activations="recompute")
    step = megatrain.TrainStep(compiled, optimizer, loss=square, max_grad_norm=clip)
    step(small)
    step.flush()
    before = snapshot(model, optimizer)
    torch.accelerator.empty_cache()
    _, total = torch.accelerator.get_memory_info(0)
    sim.configure(capacity=torch.accelerator.memory_reserved() + 8 * MIB)
    with pytest.raises(DeviceMemoryError, match=r"^sim:0 ran out of memory") as caught:
        step(wide)
    assert "There is a budget of 60.00 MiB" in str(caught.value)
    step.flush()
    assert_same(before, snapshot(model, optimizer))
    sim.configure(capacity=total)
    step(wide)
    assert step.progress.count == 2


def test_what_the_allocator_keeps_counts_as_free():
    torch.accelerator.empty_cache()
    free = find("sim").memory().free
    x = torch.empty(8 * MIB, dtype=torch.uint8, device="sim")
    del x
    assert torch.accelerator.memory_reserved() > torch.accelerator.memory_allocated()
    assert find("sim").memory().free == free
