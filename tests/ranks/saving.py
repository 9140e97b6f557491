"""Ranks that save a checkpoint together: functions that processes run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatrain
from megatrain.files.weight_files import open_checkpoint
from megatrain.saving import load
from megatrain.saving.manifest import Manifest
from megatrain.saving.save import Shard
from megatrain.training import saved_step as saving_together
from tests.ranks.failing import refused
from tests.ranks.sides import Case, begin, take

CASE = Case("tied", "deferred", [(1, 1, 1)] * 6, compile={"precision": "bf16"})


def begun() -> tuple[Any, megatrain.TrainStep, list[str]]:
    """A step after two, and the names of the files that this rank writes from now on."""
    compiled, _, step = begin(CASE, dist.group.WORLD)
    take(CASE, dist.get_rank(), step, range(2))
    return compiled, step, written()


def written() -> list[str]:
    found: list[str] = []
    write = Shard.write

    def noted(shard: Shard, folder: Path) -> Any:
        found.append(shard.file)
        return write(shard, folder)

    patched: Any = noted
    Shard.write = patched
    return found


def dividing(rank: int, folder: str) -> dict[str, Any]:
    """Each rank writes some files; then rank 0 writes all of them elsewhere, without the others."""
    _, step, files = begun()
    try:
        step.save(folder, shard_bytes=300, user={"rank": rank})
        mine = list(files)
        saving_together._owners = lambda shards, size: [0] * len(shards)
        step.save(f"{folder}-by-one", shard_bytes=300, user={"rank": rank})
    finally:
        _restore()
    return {"mine": mine, "user": load(folder).extra["user"]}


def failing(rank: int, folder: str) -> dict[str, Any]:
    """The disk of rank 1 is full in the second save; rank 0 has a value that can't be stored in the third."""
    _, step, _ = begun()
    texts = [refused(lambda: step.save(folder))]
    before = _content(folder)
    usual, full_disk = Shard.write, _full_disk()
    if rank == 1:
        Shard.write = full_disk
    texts.append(refused(lambda: step.save(folder)))
    Shard.write = usual
    kept = _content(folder) == before
    texts.append(refused(lambda: step.save(folder, user={"value": object()} if rank == 0 else None)))
    kept = kept and _content(folder) == before
    take(CASE, rank, step, [2])
    texts.append(refused(lambda: step.save(folder)))
    _restore()
    return {"texts": texts, "kept": kept, "changed": _content(folder) != before}


def apart(rank: int, folder: str) -> list[str]:
    """Rank 1 sees no folder, as on a host with a disk of its own: rank 0 writes its files."""
    _, step, files = begun()
    is_dir = Path.is_dir
    if rank == 1:
        Path.is_dir = lambda self: False
    try:
        step.save(folder, shard_bytes=300)
    finally:
        Path.is_dir = is_dir
        _restore()
    return files


def written_alone(rank: int, folder: str) -> list[str]:
    """Rank 1 alone writes a parameter between two steps."""
    compiled, step, _ = begun()
    parameter = next(compiled.megatrain.model.parameters())
    with torch.no_grad():
        before = parameter.clone()
        if rank == 1:
            parameter.data.mul_(2)
        found = [refused(lambda: step.save(folder))]
        if rank == 1:
            parameter.data.copy_(before)
        found.append(refused(lambda: step.save(folder)))
    _restore()
    return found


def before_any_step(rank: int, folder: str) -> list[str]:
    """Nobody has compared values yet: rank 0 writes everything."""
    _, _, step = begin(CASE, dist.group.WORLD)
    files = written()
    step.save(folder, shard_bytes=300)
    _restore()
    return files


def _full_disk() -> Any:
    def write(shard: Shard, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    return write


_WRITE, _OWNERS = Shard.write, saving_together._owners


def _restore() -> None:
    Shard.write, saving_together._owners = _WRITE, _OWNERS


def _content(folder: str) -> str:
    assert open_checkpoint([Path(folder)])
    return repr(Manifest.read(Path(folder)))
