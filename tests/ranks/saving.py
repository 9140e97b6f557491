"""Ranks that save a checkpoint together: functions that processes run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatrain
from megatrain.saving import load
from megatrain.saving.save import Shard
from tests.ranks.failing import refused
from tests.ranks.sides import Case, begin, take

CASE = Case("tied", "deferred", [(1, 1, 1)] * 6, compile={"precision": "bf16"})


def begun() -> tuple[Any, megatrain.TrainStep]:
    """A step after two."""
    compiled, _, step = begin(CASE, dist.group.WORLD)
    take(CASE, dist.get_rank(), step, range(2))
    return compiled, step


def saved(rank: int, folder: str) -> Any:
    """The user's values in what was saved."""
    begun()[1].save(folder, shard_bytes=300, user={"rank": rank})
    return load(folder).extra["user"]


def failing(rank: int, folder: str) -> list[str]:
    """The disk is full in the second save; rank 0 has a value that can't be stored in the third."""
    _, step = begun()
    texts = [refused(lambda: step.save(folder))]
    usual, full_disk = Shard.write, _full_disk()
    Shard.write = full_disk
    texts.append(refused(lambda: step.save(folder)))
    Shard.write = usual
    texts.append(refused(lambda: step.save(folder, user={"value": object()} if rank == 0 else None)))
    take(CASE, rank, step, [2])
    return [*texts, refused(lambda: step.save(folder))]


def written_alone(rank: int, folder: str) -> list[str]:
    """Rank 1 alone writes a parameter between two steps."""
    compiled, step = begun()
    parameter = next(compiled.megatrain.model.parameters())
    with torch.no_grad():
        before = parameter.clone()
        if rank == 1:
            parameter.data.mul_(2)
        found = [refused(lambda: step.save(folder))]
        if rank == 1:
            parameter.data.copy_(before)
        return [*found, refused(lambda: step.save(folder))]


def _full_disk() -> Any:
    def write(shard: Shard, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    return write
