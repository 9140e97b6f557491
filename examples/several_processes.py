"""Several processes train one model, each with its part of the data, and get the bits of one process.

torchrun --nproc-per-node=2 examples/several_processes.py
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import megatrain

data = TensorDataset(torch.randn(48, 16, generator=torch.Generator().manual_seed(0)))


def begin(group: Any) -> tuple[nn.Module, megatrain.TrainStep]:
    """Builds the model and its training step."""
    torch.manual_seed(0)  # the same weights in each process
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6)))
    compiled = megatrain.compile(model, device="cpu", process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, megatrain.TrainStep(compiled, optimizer, loss=loss_of, max_grad_norm=1.0)


def loss_of(result: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """The task is a sine."""
    return nn.functional.mse_loss(result, batch.sin())


def batches(rank: int, size: int, epoch: int) -> Iterator[torch.Tensor]:
    """The batches of a rank."""
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, seed=0)
    sampler.set_epoch(epoch)  # another order in each epoch, the same one on each rank
    for (rows,) in DataLoader(data, batch_size=4, sampler=sampler):
        yield rows


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model, step = begin(dist.group.WORLD)
for epoch in range(3):
    for batch in batches(rank, size, epoch):
        loss = step(batch)  # the loss of all processes' batches
    if rank == 0:
        print(f"epoch {epoch}: loss {loss:.4f}")

alone, _ = dist.new_subgroups(1)
if rank == 0:  # once more in one process, which takes the batches of all ranks as micro-batches
    other, step_alone = begin(alone)
    for epoch in range(3):
        for of_all in zip(*(batches(r, size, epoch) for r in range(size)), strict=True):
            step_alone(list(of_all))
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    print(f"{size} processes, {step.progress.count} steps; the bits of one: {all(torch.equal(*p) for p in pairs)}")
dist.barrier()
dist.destroy_process_group()
