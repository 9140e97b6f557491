"""Ranks write a checkpoint together: each some files, all or nothing, and what one process would have written."""

from __future__ import annotations

from pathlib import Path

from megatrain.saving.manifest import Manifest
from tests.ranks.processes import Processes
from tests.ranks.saving import CASE, apart, before_any_step, dividing, failing, written_alone
from tests.ranks.sides import begin, take


def with_tensors(folder: Path) -> set[str]:
    return {file for file in Manifest.read(folder).files if file.endswith(".safetensors")}


def test_each_rank_writes_a_part_of_the_files(three: Processes, tmp_path: Path):
    folder = tmp_path / "run"
    found = three.run(dividing, str(folder))
    mine = [set(each["mine"]) for each in found]
    shared = {file for file in with_tensors(folder) if "/extra" not in file}
    assert all(each & shared for each in mine), mine
    assert mine[0] | mine[1] | mine[2] == with_tensors(folder)
    assert sum(len(each & shared) for each in mine) == len(shared) == 20
    assert [each["user"] for each in found] == [{"rank": 0}] * 3
    # Byte for byte what one rank writes, and what one process does.
    by_one, alone = tmp_path / "run-by-one", tmp_path / "alone"
    assert Manifest.read(folder).files == Manifest.read(by_one).files
    step = begin(CASE)[2]
    take(CASE, None, step, range(2))
    step.save(alone, shard_bytes=300)
    for file in shared:
        assert (folder / file).read_bytes() == (by_one / file).read_bytes() == (alone / file).read_bytes(), file


def test_a_save_that_fails_on_a_rank_leaves_the_checkpoint_before(three: Processes, tmp_path: Path):
    found = three.run(failing, str(tmp_path / "run"))
    full = "rank 1 failed to write its files of the checkpoint: OSError: [Errno 28] No space left on device"
    for rank, each in enumerate(found):
        first, second, third, fourth = each["texts"]
        assert (first, fourth, each["kept"], each["changed"]) == ("", "", True, True), each
        said = "CheckpointError: " if rank == 0 else "RanksError: rank 0 failed in save(): CheckpointError: "
        assert second.partition("\n")[0] == said + full
        assert third.startswith(said + "1 value can't be stored in a checkpoint")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_what_a_rank_does_not_see_rank_0_writes(three: Processes, tmp_path: Path):
    folder = tmp_path / "run"
    first, second, third = three.run(apart, str(folder))
    assert second == []
    assert third
    assert {*first, *third} == with_tensors(folder)


def test_a_value_that_one_rank_alone_has_written_is_not_saved(three: Processes, tmp_path: Path):
    for refused, saved in three.run(written_alone, str(tmp_path / "run")):
        assert refused.startswith(
            "RanksError: the ranks differ: the value of `embedding.weight` is as it was on rank 0"
        )
        assert saved == ""


def test_before_values_were_compared_rank_0_writes_all(three: Processes, tmp_path: Path):
    folder = tmp_path / "run"
    first, second, third = three.run(before_any_step, str(folder))
    assert (second, third) == ([], [])
    assert set(first) == with_tensors(folder)
