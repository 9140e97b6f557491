"""A save that ends anywhere leaves a whole checkpoint: the previous one or the new one, found by `load`."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatrain.errors import CheckpointError
from megatrain.files import disk, load, save
from megatrain.files.save import Shard
from tests.saving.training import assert_whole, refusal, save_trained, state_of, trained

OPERATIONS = ("make", "write", "sync", "sync_folder", "rename", "unlink", "rmdir")
TWO_FILES = {"shard_bytes": 900}


class Died(BaseException):
    """The process is gone: nothing that it would do after this reaches the disk."""


class Faults:
    """Counts the operations on the disk; the `at`-th fails, and if the process dies there, all after it too.

    A write that fails has written half of its bytes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int | None, *, dies: bool):
        self.seen: list[str] = []
        self._at = at
        self._dies = dies
        for name in OPERATIONS:
            monkeypatch.setattr(disk, name, self._wrapped(name, getattr(disk, name)))

    def _wrapped(self, name: str, operation: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            index = len(self.seen)
            self.seen.append(name)
            fails = self._at is not None and (index >= self._at if self._dies else index == self._at)
            if fails and index == self._at and name == "write":
                file, piece = args
                file.write(piece[: len(piece) // 2])
            if fails:
                raise Died if self._dies else OSError(errno.ENOSPC, "No space left on device")
            operation(*args)

        return run


def operations_of(tmp_path: Path, first: bool) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path / "dry" / "run"
        if not first:
            save_trained(folder, seed=1, **TWO_FILES)
        faults = Faults(patch, None, dies=False)
        save_trained(folder, seed=2, **TWO_FILES)
    shutil.rmtree(tmp_path / "dry")
    return faults.seen


def cut_short(folder: Path, seed: int, at: int, *, dies: bool) -> None:
    """Saves, and ends or fails at one operation."""
    with pytest.MonkeyPatch.context() as patch:
        Faults(patch, at, dies=dies)
        with pytest.raises(Died if dies else CheckpointError):
            save_trained(folder, seed=seed, **TWO_FILES)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "fails"])
def test_every_operation_on_the_disk_may_be_the_last(tmp_path: Path, dies: bool):
    seen = operations_of(tmp_path, first=False)
    assert set(seen) == set(OPERATIONS)
    found = []
    for at in range(len(seen)):
        folder = tmp_path / str(at) / "run"
        save_trained(folder, seed=1, **TWO_FILES)
        cut_short(folder, 2, at, dies=dies)
        found.append(assert_whole(folder, 1, 2))
        if not dies:
            # What failed cleaned up after itself, but for the old one where that is what failed.
            assert all(name == "run" or ".old-" in name for name in names(folder.parent))
            assert folder.is_dir()
        save_trained(folder, seed=3, **TWO_FILES)
        assert assert_whole(folder, 3) == 3
        assert names(folder.parent) == ["run"]
        shutil.rmtree(folder.parent)
    # First the previous one, from some operation on the new one.
    assert found == sorted(found)
    assert set(found) == {1, 2}


def test_a_first_save_leaves_all_or_nothing(tmp_path: Path):
    for at in range(len(operations_of(tmp_path, first=True))):
        folder = tmp_path / str(at) / "run"
        cut_short(folder, 2, at, dies=True)
        if folder.exists():
            assert_whole(folder, 2)
        else:
            assert "has no checkpoint.json" in refusal(lambda folder=folder: load(folder))
        save_trained(folder, seed=3, **TWO_FILES)
        assert names(folder.parent) == ["run"]


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_save_may_end_again_while_it_tidies_up_after_another(tmp_path: Path, stride: int):
    """Two deaths in a row, the first of them near the renames."""
    seen = operations_of(tmp_path, first=False)
    pairs = [(first, second) for first in range(seen.index("rename"), len(seen)) for second in range(12)]
    for first, second in pairs[::stride]:
        folder = tmp_path / f"{first}-{second}" / "run"
        save_trained(folder, seed=1, **TWO_FILES)
        for at, seed in ((first, 2), (second, 3)):
            cut_short(folder, seed, at, dies=True)
        checkpoint = load(folder)
        checkpoint.check()
        assert checkpoint.extra["seed"] in (1, 2)
        shutil.rmtree(folder.parent)


def test_ctrl_c_in_the_middle_leaves_the_previous_one_and_nothing_else(tmp_path: Path):
    save_trained(tmp_path / "run", seed=1)

    def interrupted(_: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_trained(tmp_path / "run", seed=2, more=interrupted)
    assert assert_whole(tmp_path / "run", 1) == 1
    assert names(tmp_path) == ["run"]


def test_between_the_renames_the_new_one_is_found_without_writing_anything(tmp_path: Path):
    save_trained(tmp_path / "run", seed=1)
    cut_short(tmp_path / "run", 2, operations_of(tmp_path, first=False).index("rename") + 1, dies=True)
    before = names(tmp_path)
    assert [name[:9] for name in before] == ["run.old-" + before[0][8], "run.parti"]
    assert assert_whole(tmp_path / "run", 2) == 2
    assert names(tmp_path) == before


def test_a_removed_checkpoint_does_not_come_back(tmp_path: Path):
    save_trained(tmp_path / "run", seed=1)
    seen = operations_of(tmp_path, first=False)
    last_rename = len(seen) - seen[::-1].index("rename")
    cut_short(tmp_path / "run", 2, last_rename, dies=True)
    shutil.rmtree(tmp_path / "run")
    assert [name[:8] for name in names(tmp_path)] == ["run.old-"]
    assert "has no checkpoint.json" in refusal(lambda: load(tmp_path / "run"))


def test_a_lock_of_a_process_that_ended_is_removed(tmp_path: Path):
    save_trained(tmp_path / "run", seed=1)
    (tmp_path / "run.partial-0123456789ab").mkdir()
    (tmp_path / "run.partial-0123456789ab.lock").touch()
    save_trained(tmp_path / "run", seed=2)
    assert names(tmp_path) == ["run"]


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_trained(tmp_path / "run", seed=1)

    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(disk.FileLock, "acquire", refuse)
    text = refusal(lambda: save_trained(tmp_path / "run", seed=2))
    assert text.startswith(f"saving to `{tmp_path / 'run'}` failed: FileSystem does not appear to support flock.")
    assert_whole(tmp_path / "run", 1)
    assert names(tmp_path) == ["run"]


def test_two_saves_to_one_place_at_a_time_are_refused(tmp_path: Path):
    save_trained(tmp_path / "run", seed=1)

    def meanwhile(_: Path) -> None:
        text = refusal(lambda: save(tmp_path / "run", {"w": torch.ones(1)}))
        assert text.startswith(f"another save to `{tmp_path / 'run'}` is running, in `run.partial-")
        save(tmp_path / "elsewhere", {"w": torch.ones(1)})

    save_trained(tmp_path / "run", seed=2, more=meanwhile)
    assert_whole(tmp_path / "run", 2)
    assert names(tmp_path) == ["elsewhere", "run"]


# -- a disk without room -----------------------------------------------------------------------------------------


class Usage(NamedTuple):
    free: int


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_trained(tmp_path / "run", seed=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1000))
    monkeypatch.setattr(Shard, "write", None)
    text = refusal(lambda: save_trained(tmp_path / "run", seed=2))
    assert "the disk has 1000 B (1000 B)." in text.split("\n")[0]
    monkeypatch.undo()
    assert_whole(tmp_path / "run", 1)
    assert names(tmp_path) == ["run"]
    Faults(monkeypatch, 4, dies=False)  # it fills up while it is written
    text = refusal(lambda: save_trained(tmp_path / "run", seed=2))
    assert "No space left on device" in text.split("\n")[0]
    assert "It needs " in text.split("\n")[1]


def test_the_room_that_is_asked_for_is_what_the_files_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, optimizer = trained(1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0))
    text = refusal(lambda: save(tmp_path / "run", state_of(model), optimizer=optimizer))
    needed = int(text.split("(")[1].split(" B)")[0])
    monkeypatch.undo()
    save(tmp_path / "run", state_of(model), optimizer=optimizer)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert needed == sum(path.stat().st_size for path in files) + 8192 * len(files)
