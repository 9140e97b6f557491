"""Disk: every call by which saving changes the disk; no other file of this folder has one."""

from __future__ import annotations

import os
from contextlib import suppress
from io import RawIOBase
from pathlib import Path


def make(folder: Path) -> None:
    """Makes a folder in one that exists."""
    folder.mkdir()


def write(file: RawIOBase, piece: memoryview) -> None:
    """Writes all of `piece`."""
    while len(piece):
        count = file.write(piece)
        assert count is not None, "a file on a disk is never without room for now"
        piece = piece[count:]


def sync(file: RawIOBase) -> None:
    """Returns when the contents of `file` would survive a loss of power."""
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Returns when the names in `folder` would survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Renames a folder; `target` doesn't exist or is empty."""
    source.rename(target)


def unlink(file: Path) -> None:
    """Removes a file; another process may have been faster."""
    file.unlink(missing_ok=True)


def rmdir(folder: Path) -> None:
    """Removes an empty folder; another process may have been faster."""
    with suppress(FileNotFoundError):
        folder.rmdir()


def remove(folder: Path) -> None:
    """Removes a folder with all its contents."""
    if not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            remove(path)
        else:
            unlink(path)
    rmdir(folder)
