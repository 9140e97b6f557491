"""A card of exactly the memory that the schedule says is enough, whatever the order of the streams."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from tests.draws import is_wide
from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import DEVICE, ORDERS, choose
from tests.tiers import checkered, diagonal
from tests.training.parity import MODES, generator_of, sgd

WIDTH, ROWS, TOKENS = 128, 8, 512  # each tensor is a multiple of the 512 bytes to which the allocator rounds


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Deciding(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 3:
                x = x * 0.5 if x.mean() > 0 else x * 0.25
        return x


def loss_of(result: torch.Tensor, batch: Any) -> torch.Tensor:
    del batch
    return result.square().mean()


def held_bytes() -> int:
    """Bytes on the device when nothing runs."""
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    return torch.accelerator.memory_allocated()


def num_retries() -> int:
    """How often the allocator has waited for the device, and given back memory, because it had too little."""
    return torch.accelerator.memory_stats()["num_alloc_retries"]


@pytest.fixture
def plain(sim: Simulator) -> int:
    """An allocator that rounds to 512 bytes and no further; returns what other tests' leftovers hold."""
    gc.collect()
    torch.accelerator.empty_cache()
    sim.configure(segments=False)
    return held_bytes()


def runs_in_its_memory(
    sim: Simulator,
    plain: int,
    trained: tuple[megatrain.CompiledModule, megatrain.TrainStep],
    shape: tuple[int, int, int],
) -> None:
    """Takes steps of `shape[0]` micro-batches on a card of the schedule's bytes, in each order of the streams."""
    compiled, step = trained
    dice = generator_of(0)

    def taken() -> None:
        torch.accelerator.reset_peak_memory_stats()
        step([torch.randn(shape[1:], generator=dice).to(DEVICE) for _ in range(shape[0])])
        torch.accelerator.synchronize()

    taken()
    taken()
    sim.configure(capacity=plain + step.schedule.device_bytes)
    for seed, order in enumerate(("early", *ORDERS)):
        choose(sim, order, compiled, seed)
        held_bytes()
        before = num_retries()
        taken()
        assert torch.accelerator.max_memory_reserved() <= plain + step.schedule.device_bytes, order
        # Memory that waits for another stream would be there in the end, when the allocator has waited for the device.
        assert num_retries() == before, order


@pytest.mark.parametrize(("mode", "case"), checkered(MODES, [
    (3, {"activations": "offload"}), (3, {"activations": "keep"}), (1, {"memory": "700KiB"}), (3, {"memory": "900KiB"}),
]))  # fmt: skip
def test_steps_run_in_exactly_the_memory_of_the_schedule(
    sim: Simulator, plain: int, mode: str, case: tuple[int, dict[str, Any]]
):
    micro_batches, options = case
    if mode == "serial" and not is_wide():
        pytest.skip("one serial mode: make device has the other")
    model = Blocks()
    compiled = megatrain.compile(model, device=DEVICE, **options)
    step = megatrain.TrainStep(compiled, sgd(model), loss=loss_of, **MODES[mode])
    runs_in_its_memory(sim, plain, (compiled, step), (micro_batches, ROWS, WIDTH))


@pytest.mark.parametrize(("mode", "case"), diagonal(MODES, [(1, "recompute"), (2, "offload"), (2, "keep")]))
def test_tiled_steps_run_in_exactly_the_memory_of_the_schedule(
    sim: Simulator, plain: int, mode: str, case: tuple[int, str]
):
    micro_batches, activations = case
    if mode == "serial" and not is_wide():
        pytest.skip("one serial mode: make device has the other")
    model = Blocks()
    compiled = megatrain.compile(model, device=DEVICE, chunking="always", activations=activations)
    step = megatrain.TrainStep(compiled, sgd(model), loss=loss_of, **MODES[mode])
    runs_in_its_memory(sim, plain, (compiled, step), (micro_batches, TOKENS, WIDTH))
    assert "tiled(" in str(step.program)


def test_batches_of_other_sizes_share_one_budget(sim: Simulator, plain: int):
    """A small batch has room for two slots, a large one for a single slot only: the arena must make way for it."""
    width, budget = 512, 4_470_000
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))
    compiled = megatrain.compile(model, device=DEVICE, memory=budget, activations="offload")
    step = megatrain.TrainStep(compiled, sgd(model), loss=loss_of)
    slots: list[int] = []
    for number, rows in enumerate((8, 128, 8, 128)):
        batch = torch.randn(rows, width, generator=generator_of(number)).to(DEVICE)
        slots.append(step.prepare(batch).num_slots)
        torch.accelerator.reset_peak_memory_stats()
        step(batch)
        torch.accelerator.synchronize()
        assert torch.accelerator.max_memory_allocated() <= plain + budget, number
    assert slots == [2, 1, 2, 1]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_what_runs_again_with_another_capture_takes_no_more_memory(plain: int, number: int):
    """Nothing of the attempt that failed is left when the next one begins.

    Args:
        plain: See the fixture.
        number: How many micro-batches a step has; 0 is a call and its backward.
    """
    model = Deciding()
    compiled = megatrain.compile(model, device=DEVICE)
    step = megatrain.TrainStep(compiled, sgd(model), loss=loss_of)
    dice, peaks = generator_of(0), dict[float, list[int]]()
    gc.collect()
    gc.disable()  # which may find the failed attempt in time, or not
    try:
        for mean in (1.0, -1.0, 1.0, -1.0):  # the first capture is tried first
            batches = [(torch.randn(TOKENS, WIDTH, generator=dice) + mean).to(DEVICE) for _ in range(max(1, number))]
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            if number:
                step(batches)
            else:
                compiled(batches[0]).square().mean().backward()
            torch.accelerator.synchronize()
            model.zero_grad()
            peaks.setdefault(mean, []).append(torch.accelerator.max_memory_allocated() - plain)
    finally:
        gc.enable()
    assert str(compiled.megatrain).count("\n  capture ") == 2
    assert peaks[-1.0][1] <= peaks[1.0][1]
    if number:  # the mean that Python code reads takes 4 bytes, for which the allocator gives 512
        assert max(map(max, peaks.values())) <= step.schedule.device_bytes + 512 * number, "captures included"
