"""A checkpoint of ranks is that of one process, whole or not there, and goes on in any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatrain
from megatrain.files.save import Shard
from tests.comparing import assert_same
from tests.nightly import nightly
from tests.ranks.processes import Processes, refused
from tests.ranks.sides import Case, begin, resume, resume_here, state_of, take

CASE = Case("tied", "deferred", [(1, 1, 1)] * 6, compile={"precision": "bf16"})


def begun() -> tuple[Any, megatrain.TrainStep]:
    """A step after two."""
    compiled, _, step = begin(CASE, dist.group.WORLD)
    take(CASE, dist.get_rank(), step, range(2))
    return compiled, step


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


def _full_disk() -> Any:
    def write(shard: Shard, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    return write


TWO = Case("tied", "deferred", [(1, 1)] * 2, compile={"precision": "bf16"})
FOUR_STEPS = replace(TWO, deal=[(1, 1)] * 4)


@pytest.mark.nightly
def test_a_save_that_fails_leaves_the_checkpoint_before(three: Processes, tmp_path: Path):
    for rank, (first, second, third, fourth) in enumerate(three.run(failing, str(tmp_path / "run"))):
        assert (first, fourth) == ("", "")
        said = "CheckpointError: " if rank == 0 else "RanksError: rank 0 failed in save(): CheckpointError: "
        assert second.startswith(said)
        assert "No space left on device" in second
        assert third.startswith(said + "1 value can't be stored in a checkpoint")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("reader", [nightly("two"), nightly("alone")])
def test_a_checkpoint_of_two_ranks_goes_on_elsewhere(reader: str, three: Processes, tmp_path: Path):
    folder = str(tmp_path / "run")
    assert three.run(resume_here, TWO, folder, 0, True)[:2] == [True, True]
    if reader == "alone":
        found = [resume(FOUR_STEPS, None, None, folder, 2, saves=False)]
    else:
        found = three.run(resume_here, FOUR_STEPS, folder, 2, False)[:2]
    compiled, optimizer, step = begin(FOUR_STEPS)
    torch.manual_seed(6)
    take(FOUR_STEPS, None, step, range(2))
    expected = {**take(FOUR_STEPS, None, step, range(2, 4)), **state_of(compiled, optimizer, step)}
    for rank, side in enumerate(found):
        assert not isinstance(side, BaseException), side
        if rank > 0:
            del side["generator"]
        assert_same({name: expected[name] for name in side}, side, f"rank {rank}")
