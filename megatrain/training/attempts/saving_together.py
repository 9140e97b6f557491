"""save_together(): the ranks of a process group write one checkpoint, each some of its files; rank 0 leads.

Rank 0 writes as a process alone does, but files with weights and training state are divided among the ranks that see
the folder. There are three meetings: rank 0 tells who writes which file where, all tell what they have written, and
rank 0 tells how it ended. If it fails it makes the meetings that are left, for which the others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatrain.errors import CheckpointError, RanksError
from megatrain.files import disk
from megatrain.ranks.meeting import words_of
from megatrain.saving.manifest import FileRecord
from megatrain.saving.save import CheckpointDraft
from megatrain.saving.shards import Shard
from megatrain.training.attempts.together import Together

_AT = "save()"


def save_together(
    together: Together, draft: Callable[[bool], CheckpointDraft], folder: Any, more: Callable[[Path], object] | None
) -> None:
    """Writes a checkpoint; all ranks call it.

    Args:
        together: The ranks.
        draft: Makes what is written: with the caller's values, or without them, as the other ranks need it.
        folder: As in `saving.save`; that of rank 0 counts.
        more: See there; runs on rank 0.

    Raises:
        CheckpointError: As `saving.save`; of rank 0.
        RanksError: If another rank fails, or was changed by code that ran on it alone.
    """
    if not together.is_shared:
        draft(True).save(folder, more)
    elif together.place[0] == 0:
        _Leader(together).save(draft, folder, more)
    else:
        _follow(together, draft)


class _Leader:
    """Rank 0."""

    def __init__(self, together: Together):
        self._together = together
        self._num_met = 0

    def save(
        self, draft: Callable[[bool], CheckpointDraft], folder: Any, more: Callable[[Path], object] | None
    ) -> None:
        said, error = "", None
        try:
            draft(True).save(folder, more, self._write)
        except RanksError:
            raise  # so does every rank
        except Exception as caught:
            said, error = words_of(caught), caught
        while self._num_met < 2:
            self._tell({"folder": None, "records": {}, "said": said})
        self._tell({"said": said})
        if error is not None:
            raise error

    def _tell(self, word: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._num_met += 1
        return _tell(self._together, word)

    def _write(self, shards: Sequence[Shard], folder: Path) -> Mapping[str, FileRecord]:
        files = {
            shard.file: [owner, _mark(shard)]
            for shard, owner in zip(shards, _owners(shards, self._together.place[1]), strict=True)
        }
        told = self._tell({"folder": str(folder), "files": files, **_state(self._together)})
        mine = _of_rank(files, 0) if _agree(self._together, told) else files
        found = {shard.file: shard.write(folder) for shard in shards if shard.file in mine}
        for rank, word in enumerate(self._tell({"records": {}, "said": ""})):
            if word["said"]:
                raise CheckpointError(
                    f"rank {rank} failed to write its files of the checkpoint: {word['said']}\n"
                    "  Each rank writes some of the files, and a checkpoint is complete or not there.\n"
                    "  The previous checkpoint is still complete. Mend what failed there, then save again."
                )
            found |= {file: FileRecord.of_json(record) for file, record in word["records"].items()}
        # What no other rank could write.
        return {shard.file: found.get(shard.file) or shard.write(folder) for shard in shards}


def _follow(together: Together, draft: Callable[[bool], CheckpointDraft]) -> None:
    """Writes what rank 0 says."""
    try:
        state = _state(together)
    except Exception as error:
        with suppress(RanksError):
            _tell(together, {"failed": words_of(error)})
        raise
    told = _tell(together, state)
    records, said = {}, ""
    if told[0]["folder"] is not None and _agree(together, told):
        try:
            records = _written(draft, Path(told[0]["folder"]), _of_rank(told[0]["files"], together.place[0]))
        except Exception as error:
            said = words_of(error)
    _tell(together, {"records": records, "said": said})
    said = _tell(together, {"said": ""})[0]["said"]
    if said:
        raise RanksError(f"rank 0 failed in {_AT}: {said}")


def _written(draft: Callable[[bool], CheckpointDraft], folder: Path, marks: Mapping[str, str]) -> dict[str, Any]:
    """Writes files that this rank would lay out as rank 0 does, if it sees the folder; returns their records."""
    if not marks or not folder.is_dir():
        return {}
    same = [shard for shard in draft(False).shared if marks.get(shard.file) == _mark(shard)]
    found = {shard.file: shard.write(folder).to_json() for shard in same}
    for inner in {(folder / shard.file).parent for shard in same}:
        disk.sync_folder(inner)
    return found


def _tell(together: Together, word: Mapping[str, Any]) -> list[dict[str, Any]]:
    told = together.tell_all(_AT, word)
    assert told is not None
    return told


def _state(together: Together) -> dict[str, Any]:
    return {"compared": together.is_compared, "changed": together.changed()}


def _agree(together: Together, told: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all ranks have the same values, as far as anybody knows.

    Raises:
        RanksError: If code that ran on one rank alone has changed some, on all ranks.
    """
    together.check_changed([word["changed"] for word in told])
    return all(word["compared"] for word in told)


def _owners(shards: Sequence[Shard], size: int) -> list[int]:
    """The rank that writes each file: the largest first, each to the rank with the least bytes so far."""
    left, found = [0] * size, [0] * len(shards)
    for index in sorted(range(len(shards)), key=lambda index: -shards[index].nbytes):
        found[index] = left.index(min(left))
        left[found[index]] += shards[index].nbytes
    return found


def _of_rank(files: Mapping[str, Sequence[Any]], rank: int) -> dict[str, str]:
    return {file: mark for file, (owner, mark) in files.items() if owner == rank}


def _mark(shard: Shard) -> str:
    """Equal for files with the same layout."""
    return shard.record({}).digest
