"""Replace: a folder is written next to its final place and renamed, so that a complete one always exists.

For a folder `run` there may be, next to it:

    run.partial-<id>        being written, or left over
    run.partial-<id>.lock   held by the process that writes it; the lock ends with the process in any case
    run.old-<id>            the previous `run`, while `run.partial-<id>` takes its place

`run.old-<id>` exists only after `run.partial-<id>` is complete. So if `run` is missing and both of these exist, a save
ended between its two renames, and `run.partial-<id>` is the new content of `run`.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatrain.errors import CheckpointError
from megatrain.files import disk

_PARTIAL = ".partial-"
_OLD = ".old-"
_LOCK = ".lock"


def resolved(folder: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a folder, links followed.

    Raises:
        CheckpointError: If the system can't follow it.
    """
    try:
        place = Path(folder).resolve()
        place.exists()
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to one another
        raise CheckpointError(
            f"`{folder}` can't be a folder: {str(error)[:300]}.\n"
            "  The operating system refuses this path.\n  Give another one."
        ) from error
    return place


def present(folder: Path) -> Path:
    """Returns the place of the newest complete content of `folder`: there, or where an ended save left it."""
    try:
        if folder.exists():
            return folder
    except (OSError, ValueError):  # a path that the system can't take, as reading it will say
        return folder
    twins = (_twin(folder, old) for old in _beside(folder, _OLD))
    return next((partial for partial in twins if partial.exists()), folder)


@contextmanager
def replaced(folder: Path) -> Generator[Path]:
    """Gives a new folder to write to; when the body ends, it takes the place of `folder`.

    The body syncs its files. If it raises, `folder` stays as it was and the new files are removed.

    Raises:
        CheckpointError: If another process is saving there.
        OSError: If the disk refuses; `folder` is then the previous one or the new one.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _tidy(folder)
    partial = folder.with_name(f"{folder.name}{_PARTIAL}{uuid.uuid4().hex[:12]}")
    # Not inside the folder, which Windows doesn't rename while a file in it is open.
    lock = partial.with_name(partial.name + _LOCK)
    try:
        with disk.locked(lock):
            disk.make(partial)
            try:
                yield partial
                _exchange(folder, partial)
            except BaseException:
                _undo(folder, partial)
                raise
    finally:
        with suppress(OSError):  # the next save removes it
            lock.unlink(missing_ok=True)


def _exchange(folder: Path, partial: Path) -> None:
    for inner, _, _ in os.walk(partial):
        disk.sync_folder(Path(inner))
    old = _twin(folder, partial)
    if folder.exists():
        disk.rename(folder, old)
        # Both renames are in one folder, but they may reach the disk in any order.
        disk.sync_folder(folder.parent)
    disk.rename(partial, folder)
    disk.sync_folder(folder.parent)
    try:
        disk.remove(old)
    except OSError as error:
        raise CheckpointError(
            f"`{folder}` is saved, but the previous one could not be removed: {error}.\n"
            f"  All or part of it is in `{old}`.\n  Remove this folder; the next save tries to remove it, too."
        ) from error


def _undo(folder: Path, partial: Path) -> None:
    old = _twin(folder, partial)
    if old.exists() and not folder.exists():
        disk.rename(old, folder)
    disk.remove(partial)


def _tidy(folder: Path) -> None:
    """Finishes a save that was ended between its renames, and removes leftovers."""
    leftovers = [*_beside(folder, _PARTIAL), *_beside(folder, _OLD)]
    locks = list(_beside(folder, _PARTIAL, _LOCK))
    for lock in locks:
        try:
            with disk.locked(lock):
                pass
        except BlockingIOError as error:
            raise CheckpointError(
                f"another save to `{folder}` is running, in `{lock.name.removesuffix(_LOCK)}`.\n"
                "  Two saves at the same time would remove each other's files.\n"
                "  Wait for the other save, or save to another folder."
            ) from error
    whole = present(folder)
    if whole != folder:
        disk.rename(whole, folder)
        disk.sync_folder(folder.parent)
    for leftover in leftovers:
        if folder.exists() or _PARTIAL in leftover.name.removeprefix(folder.name):
            disk.remove(leftover)
    for lock in locks:
        disk.unlink(lock)


def _beside(folder: Path, infix: str, suffix: str = "") -> Iterator[Path]:
    pattern = re.compile(re.escape(folder.name + infix) + "[0-9a-f]{12}" + re.escape(suffix))
    if folder.parent.is_dir():
        yield from sorted(path for path in folder.parent.iterdir() if pattern.fullmatch(path.name))


def _twin(folder: Path, path: Path) -> Path:
    """The folder with the same id and the other infix."""
    unique = path.name.rpartition("-")[2]
    infix = _OLD if _PARTIAL in path.name.removeprefix(folder.name) else _PARTIAL
    return folder.with_name(f"{folder.name}{infix}{unique}")
