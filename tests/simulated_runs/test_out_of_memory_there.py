"""A simulated device with too little memory: the budget knows what is free, and a step leaves no trace."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import megatrain
from megatrain.device import find
from megatrain.errors import DeviceMemoryWarning
from megatrain.memory.out_of_memory import DeviceMemoryError
from megatrain.sizes import format_bytes
from tests.simulated_device.simulator import Simulator
from tests.tiers import one_in
from tests.training.parity import MODES, adamw, assert_same, snapshot

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


def stack() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(12)))


@pytest.mark.parametrize("mode", one_in(5, MODES))
def test_a_budget_that_nobody_gave_gets_smaller_where_it_is_too_much(sim: Simulator, mode: str):
    """Another process takes a part of the card after the budget was found, as holes of the allocator do."""
    _, total = torch.accelerator.get_memory_info(0)
    models, optimizers = (stack(), stack()), []
    steps: list[megatrain.TrainStep] = []
    batches = [[torch.randn(4096, 256).to("sim") for _ in range(2)] for _ in range(3)]
    planned: list[int] = []
    for model in models:
        torch.accelerator.empty_cache()
        sim.configure(capacity=torch.accelerator.memory_reserved() + 220 * MIB)
        optimizers.append(adamw(model))
        compiled = megatrain.compile(model, device="sim", block_bytes="256KiB")
        steps.append(megatrain.TrainStep(compiled, optimizers[-1], loss=square, **MODES[mode]))
        planned.append(steps[-1].prepare(batches[0]).device_bytes)
        sim.configure(capacity=total)
    for number, batch in enumerate(batches):
        losses = [steps[0](batch)]
        if number == 0:
            steps[0].flush()
            gc.collect()
            torch.accelerator.empty_cache()
            sim.configure(capacity=torch.accelerator.memory_reserved() + planned[1] * 3 // 4)
            with pytest.warns(DeviceMemoryWarning, match="repeated with a smaller budget, which further ones keep"):
                losses.append(steps[1](batch))
            sim.configure(capacity=total)
        else:
            losses.append(steps[1](batch))
        assert torch.equal(losses[0].cpu(), losses[1].cpu())
        for step in steps:
            step.flush()
        here, there = (snapshot(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True))
        assert_same(here, there)
    assert steps[1].schedule.device_bytes < planned[1] == planned[0]
    assert "lowered after a step ran out of memory" in repr(steps[1])


def test_a_card_that_is_too_small_for_any_budget_says_how_large_the_first_was(sim: Simulator):
    _, total = torch.accelerator.get_memory_info(0)
    model = stack()
    step = megatrain.TrainStep(megatrain.compile(model, device="sim"), adamw(model), loss=square)
    batch, before = torch.randn(16384, 256).to("sim"), snapshot(model)
    planned = step.prepare(batch).device_bytes
    torch.accelerator.empty_cache()
    sim.configure(capacity=torch.accelerator.memory_reserved() + 8 * MIB)
    with pytest.raises(DeviceMemoryError, match=r"^sim:0 ran out of memory") as caught:
        step(batch)
    assert f"the schedule counts {format_bytes(planned)}" in str(caught.value)
    sim.configure(capacity=total)
    assert_same(before, snapshot(model))
    # Smaller budgets didn't help, and the first one is back.
    assert step.prepare(batch).device_bytes == planned
    assert "lowered" not in repr(step)
    step(batch)
    assert step.progress.count == 1


def test_what_the_allocator_keeps_counts_as_free():
    torch.accelerator.empty_cache()
    free = find("sim").memory().free
    x = torch.empty(8 * MIB, dtype=torch.uint8, device="sim")
    del x
    assert torch.accelerator.memory_reserved() > torch.accelerator.memory_allocated()
    assert find("sim").memory().free == free
