"""Recorded kernels (CUDA graphs) in each order of the streams, in a budget, and in less time where launches bind."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import DeviceMemoryWarning
from megatrain.hardware.hardware import Hardware
from tests.comparing import assert_same
from tests.equal_blocks import EqualBlocks
from tests.simulated_device.simulator import GIB, HardwareProfile, Simulator
from tests.simulated_device.virtual_hosts import VirtualHosts
from tests.simulated_runs.on_device import DEVICE, ORDERS, choose, on_device
from tests.simulated_runs.test_capacity_there import ROWS, WIDTH, Blocks, held_bytes, loss_of
from tests.tiers import diagonal, wide
from tests.training.parity import MODES, TASKS, adamw, generator_of, sgd

COUNT = 2


class Layers(nn.Module):
    """Layers of many short kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            for _ in range(20):
                y = y.tanh() + x
            x = y
        return x.sum()


def steps(sim: Simulator, kernels: str, name: str, mode: str) -> list[Any]:
    """Takes steps of other inputs in each order of the streams."""
    task = TASKS[name]
    sim.order("early")
    torch.manual_seed(0)
    model = task.build()
    compiled = megatrain.compile(model, device=DEVICE, activations="offload", kernels=kernels)
    step = megatrain.TrainStep(compiled, adamw(model), loss=task.loss, **MODES[mode])
    losses: list[float] = []
    for seed, order in enumerate(("early", *ORDERS) if kernels == "graphs" else ("early",) * (len(ORDERS) + 1)):
        choose(sim, order, compiled, seed)
        for number in range(COUNT):
            given = [task.batch(100 * seed + 10 * number + part, 2) for part in range(2)]
            losses.append(step(on_device(given)).item())
    sim.order("early")
    step.flush()
    return [losses, [p.detach().clone() for p in model.parameters()]]


@pytest.mark.parametrize(("mode", "name"), diagonal(MODES, ("stack", "gpt", "llama")))
def test_any_order_of_the_streams_has_eagers_bits(sim: Simulator, name: str, mode: str):
    assert_same(steps(sim, "eager", name, mode), steps(sim, "graphs", name, mode))
    assert sim.violations() == []


@pytest.mark.parametrize(("mode", "micro_batches"), diagonal(MODES, [1, 3]))
def test_steps_run_on_a_card_of_their_budget(sim: Simulator, mode: str, micro_batches: int):
    """What the schedule takes and what recordings hold, first run and recording included."""
    sim.configure(segments=False)
    plain, dice = held_bytes(), generator_of(0)

    for budget in (1_600_000, 3_000_000):
        sim.configure(capacity=GIB)
        model = Blocks()
        compiled = megatrain.compile(model, device=DEVICE, kernels="graphs", memory=budget)
        step = megatrain.TrainStep(compiled, sgd(model), loss=loss_of, **MODES[mode])
        for number, order in enumerate(("early", "early", "early", *ORDERS)):
            batch = [torch.randn(ROWS, WIDTH, generator=dice).to(DEVICE) for _ in range(micro_batches)]
            if number == 0:
                assert step.prepare(batch).device_bytes < budget
                sim.configure(capacity=plain + budget)
            choose(sim, order, compiled)
            with warnings.catch_warnings():
                warnings.simplefilter("error", DeviceMemoryWarning)  # of a step that ran out of memory
                step(batch)
        sim.order("early")
        step.flush()
        del model, compiled, step
        held_bytes()


def test_memory_of_recordings_goes_with_the_model(sim: Simulator):
    sim.configure(segments=False)
    before = held_bytes()

    def train() -> int:
        model = EqualBlocks(6)
        compiled = megatrain.compile(model, device=DEVICE, kernels="graphs")
        for number in range(3):
            compiled(torch.randn(8, 32, generator=generator_of(number)).to(DEVICE)).sum().backward()
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        return torch.accelerator.memory_reserved()

    assert train() > before
    held_bytes()
    assert torch.accelerator.memory_reserved() <= before


@pytest.mark.parametrize("mode", ["overlap", wide("deferred")])
def test_short_kernels_wait_for_python_no_more(sim: Simulator, mode: str):
    """Modelled: 20 us to launch a kernel, and kernels of less than that."""
    machine = Hardware(25e9, 25e9, {"fp32": 2e13}, launch_s=1e-6, issue_s=20e-6, memory_bytes_per_s=1e12)
    sim.configure(compute=False, poison=False)
    hosts = VirtualHosts(sim, 1e12)
    taken: dict[str, float] = {}
    for kernels in ("eager", "graphs"):
        compiled = megatrain.compile(Layers(), device=DEVICE, activations="recompute", kernels=kernels)
        step = megatrain.TrainStep(compiled, adamw(compiled), **MODES[mode])
        batch = [torch.empty(64, 64, device=DEVICE) for _ in range(4)]
        sim.set_profile(None)
        for _ in range(3):
            step(batch)
        sim.set_profile(HardwareProfile.of(machine))
        hosts.take(step, batch)
        taken[kernels] = hosts.take(step, batch)
        step.flush()
    assert taken["graphs"] < 0.6 * taken["eager"], taken
