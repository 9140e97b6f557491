"""What ranks do on simulated devices: functions that processes run."""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import megatrain
from megatrain.device import find
from tests.ranks.failing import refused
from tests.ranks.sides import OURS, Case, begin, moved, take, train, train_here
from tests.simulated_device.loading import load
from tests.simulated_runs.on_device import choose
from tests.training.parity import seeded_stack, square, stack_batch


def train_there(rank: int, case: Case) -> Any:
    """What a rank runs, with the streams in the order of the case."""
    simulator = load()
    simulator.reset()
    choose(simulator, case.order, seed=rank)
    found = train_here(rank, case)
    simulator.order("early")
    assert simulator.violations() == []
    return found


def train_alone_there(rank: int, case: Case) -> Any:
    """What one process computes; the other ranks have nothing to do."""
    load().reset()
    alone: Any = dist.new_group([0])
    return train(case, alone, None) if rank == 0 else None


def locked_there(rank: int, case: Case) -> dict[str, Any]:
    """What is page-locked after some steps, and whether this rank has copies of what all share."""
    load().reset()
    compiled, _, step = begin(case, dist.group.WORLD)
    take(case, rank, step, range(len(case.deal)))
    step.flush()
    engine = compiled.megatrain.engine
    residencies = engine.store.residencies.values()
    return {
        "shares": step._exchange.shares,
        "sent": all(home.sent is not None and home.sent.arena.is_locked for home in residencies),
        "private": any(home.arena.is_locked for home in residencies),
        "copies": sorted(name.key for name, twin in compiled.megatrain.ranks.store.twins.items() if twin.is_written),
    }


def waiting_there(rank: int, case: Case) -> list[str]:
    """Where the launching thread waits for the device in the third step."""
    simulator = load()
    simulator.reset()
    _, _, step = begin(case, dist.group.WORLD)
    take(case, rank, step, range(2))
    given = [moved(batch, case.device(rank)) for batch in case.batches(2)[rank]]
    with simulator.synchronizations() as found:
        step(given)
    return [str(one) for one in found if not one.thread.startswith("megatrain-")]


def evaluating_there(rank: int, case: Case) -> list[bool]:
    """Rank 1 writes weights for an evaluation of its own, and back; whether each evaluation has eager's bits."""
    load().reset()
    compiled, _, step = begin(case, dist.group.WORLD)
    take(case, rank, step, range(2))
    model, batch = compiled.megatrain.model, moved(OURS[case.task].batch(7, 2), case.device(rank))
    parameter = next(p for p in model.parameters() if p.requires_grad)
    before, found = parameter.detach().clone(), list[bool]()
    for factor in (1.0, 2.0 if rank == 1 else 1.0):
        parameter.data.mul_(factor)
        with torch.no_grad():
            eager = copy.deepcopy(model).to(case.device(rank))(**batch)
            found.append(torch.equal(compiled(**batch)["logits"].cpu(), eager["logits"].cpu()))
    parameter.data.copy_(before)
    take(case, rank, step, [2])
    return found


def sharing_a_card(rank: int) -> str:
    """Each rank asks for the device that the others have."""
    simulator = load()
    simulator.reset()
    device = find("sim:0")
    device.identity = lambda: "the only card"  # pyright: ignore
    return refused(lambda: megatrain.compile(seeded_stack(2), device=device, process_group=dist.group.WORLD))


def running_out(rank: int) -> list[str]:
    """The second step of rank 1 has too little memory; then there is another."""
    simulator = load()
    simulator.reset()
    device = f"sim:{rank % 2}"
    model = seeded_stack(3)
    compiled = megatrain.compile(model, device=device, process_group=dist.group.WORLD)
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=0.1), loss=square)
    found: list[str] = []
    for number in range(3):
        batch = stack_batch(10 * number + rank, 2).to(device)
        if number == 1 and rank == 1:
            batch = batch.repeat(1 << 20, 1)
            simulator.set_capacity(1, torch.accelerator.memory_reserved(device))
        found.append(refused(lambda batch=batch: step(batch)).partition("\n")[0])
    return found


class Choosing(nn.Module):
    """Python code reads a value in the last block; tensors are multiples of the bytes to which the allocator rounds."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.mean()
        for layer in self.layers:
            x = layer(x).tanh()
        return x.cos() if (x.abs() * given).sum() > 0 else x.sin()


def holding(rank: int, activations: str) -> dict[str, Any]:
    """The most bytes that each of some steps holds on the device, and its schedule's bytes and last block's ops."""
    simulator = load()
    simulator.reset()
    device, peaks = f"sim:{rank % 2}", list[int]()
    gc.collect()
    held = torch.accelerator.memory_allocated(device)
    torch.manual_seed(4)
    model = Choosing()
    compiled = megatrain.compile(model, device=device, process_group=dist.group.WORLD, activations=activations)
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=0.1), loss=square)
    for _ in range(3):
        batches = [torch.rand(512, 128).to(device) for _ in range(3)]
        gc.collect()
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        step(batches)
        torch.accelerator.synchronize(device)
        peaks.append(torch.accelerator.max_memory_allocated(device) - held)
    step.flush()
    ops = [str(op) for op in step.schedule.ops if op.block == 4 and op.what in "FB"]
    return {"peaks": peaks, "planned": step.schedule.device_bytes, "ops": ops}
