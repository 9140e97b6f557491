"""ScratchFile: a file without a name, for data of this process that the host's memory has no room for."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import torch

from megatrain.base.sizes import PAGE, format_bytes
from megatrain.errors import ExecuteError, OptionError

_PIECE, _THREADS = 8 << 20, 8
_IN_MEMORY = ("tmpfs", "ramfs")


class Content(NamedTuple):
    """What is in a file, and what helps if the disk fails, for errors.

    Attributes:
        name: As in "optimizer state".
        is_when: The rest of a sentence, whose place is to be filled in.
        way_out: A sentence.
    """

    name: str
    is_when: str
    way_out: str

    def has(self, where: str) -> str:
        """Says that this is somewhere, and when."""
        return f"{self.name.capitalize()} {self.is_when.format(where)}."


STATE = Content("optimizer state", "is {} between updates", "Load the latest checkpoint, with another folder.")
ACTIVATIONS = Content("activations", "are {} in the middle of a step", "Give another folder.")


class FileRange(NamedTuple):
    """Bytes of the file, and where they are in a buffer."""

    offset: int
    nbytes: int
    at: int


class ScratchFile:
    """A file of this process alone, of a fixed size, zeroed, and gone with the process however that ends.

    It has no name from the start, so nobody can change, cut off or remove it, and nothing is left of a process that was
    killed. (Windows removes it with its last handle.) All its room is taken at once: a disk that is full fails here.

    Reads and writes go past the system's cache of files (`O_DIRECT`) where the file system offers that, in pieces that
    several threads move; else through the cache. `tensor` maps the same bytes: who looks there reads what was written
    last, through the cache.

    Args:
        folder: An existing folder on a disk.
        nbytes: A multiple of `PAGE`.
        content: What it has, for errors.

    Attributes:
        is_direct: Reads and writes go past the cache.

    Raises:
        OptionError: If the folder isn't one, is in memory, can't be written to, or its disk lacks the room.
    """

    def __init__(self, folder: Path, nbytes: int, content: Content = STATE) -> None:
        assert nbytes % PAGE == 0
        self.folder, self.nbytes, self._content = folder, nbytes, content
        self._process = os.getpid()
        # No executor of the library: its locks aren't for code that Python runs in the middle of others, as `__del__`.
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._num_threads = 0
        self._files: list[int] = []
        self._pages: mmap.mmap | None = None
        check_disk(folder, content)
        try:
            self._make()
            if nbytes:
                _reserve(self._files[0], nbytes)
                self._pages = mmap.mmap(self._files[0], nbytes)
            self._num_threads = _THREADS if hasattr(os, "preadv") else 1  # others share the place in the file
            for number in range(self._num_threads):
                Thread(target=_serve, args=(self._work,), name=f"disk {number}", daemon=True).start()
        except OSError as error:
            self.close()
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                free = f"{format_bytes(nbytes)} are needed, {format_bytes(_free(folder))} are free"
                what = f"has no room for it: {free} ({os.strerror(error.errno)})"
                raise _refused(folder, content, what, "Free some room, or give a folder on a larger disk.") from error
            what = f"can't be written to: {os.strerror(error.errno or 0)}"
            raise _refused(
                folder, content, what, "Give an existing folder in which this process may make files."
            ) from error
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_TEMPORARY", 0)
        path = self.folder / f"megatrain-{secrets.token_hex(8)}"
        self._files.append(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600))
        self.is_direct = False
        try:
            with contextlib.suppress(OSError, AttributeError):  # a file system without direct I/O, or such a system
                self._files.append(os.open(path, flags | os.O_DIRECT))
                self.is_direct = True
        finally:
            if not hasattr(os, "O_TEMPORARY"):
                os.unlink(path)

    @property
    def how(self) -> str:
        """How it is read and written, in words."""
        return "direct I/O" if self.is_direct else "through the system's cache of files"

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """A range of bytes, at least one, as a tensor with a storage of its own, which keeps the map alive."""
        assert self._pages is not None
        return torch.frombuffer(self._pages, dtype=torch.uint8, offset=offset, count=nbytes)

    def read(self, ranges: Sequence[FileRange], buffer: torch.Tensor) -> None:
        """Reads ranges of bytes into a buffer whose address is a multiple of `PAGE`, as their sizes and places are.

        Raises:
            ExecuteError: If the disk fails; the buffer may have a part of them then.
        """
        self._move(ranges, buffer, os.preadv if hasattr(os, "preadv") else _pread, "read")

    def write(self, ranges: Sequence[FileRange], buffer: torch.Tensor) -> None:
        """The reverse, likewise; a write that fails can be repeated."""
        self._move(ranges, buffer, os.pwritev if hasattr(os, "pwritev") else _pwrite, "write")

    def _move(
        self,
        ranges: Sequence[FileRange],
        buffer: torch.Tensor,
        call: Callable[[int, list[memoryview], int], int],
        what: str,
    ) -> None:
        if os.getpid() != self._process:
            raise ExecuteError(
                f"a forked process can't change {self._content.name} in a file, which is that of the first process.\n"
                "  Updates were due when it was forked, or it takes steps of its own.\n"
                "  Call flush() of the step before the fork, or leave offload out."
            )
        memory = memoryview(buffer.numpy())  # pyright: ignore[reportArgumentType]

        def move(piece: FileRange) -> None:
            done = 0
            while done < piece.nbytes:
                part = memory[piece.at + done : piece.at + piece.nbytes]
                moved = call(self._files[-1], [part], piece.offset + done)
                if moved == 0:
                    raise OSError(errno.EIO, "the file ends too early")
                done += moved

        ended: SimpleQueue[BaseException | None] = SimpleQueue()
        pieces = list(_pieces(ranges))
        for piece in pieces:
            self._work.put((partial(move, piece), ended))
        # All of them end before an error is raised: nothing moves afterwards.
        error = next((error for error in [ended.get() for _ in pieces] if error is not None), None)
        if isinstance(error, OSError):
            raise ExecuteError(
                f"the disk of `{self.folder}` fails to {what} {format_bytes(sum(each.nbytes for each in ranges))}: "
                f"{error.strerror or error}.\n  {self._content.has('there')}\n  {self._content.way_out}"
            ) from error
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends its threads and lets go of the file; its room is free when no tensor views it any more."""
        for _ in range(self._num_threads):
            self._work.put(None)
        self._num_threads = 0
        while self._files:
            os.close(self._files.pop())
        self._pages = None

    def __del__(self, _is_over: Callable[[], bool] = sys.is_finalizing) -> None:  # at the end even `sys` may be gone
        if not _is_over() and os.getpid() == self._process:
            self.close()


_Work = tuple[Callable[[], None], SimpleQueue[BaseException | None]]


def _serve(work: SimpleQueue[_Work | None]) -> None:
    while (item := work.get()) is not None:
        task, ended = item
        try:
            task()
        except BaseException as error:
            ended.put(error)
        else:
            ended.put(None)
        del item, task, ended  # the buffer isn't kept from being freed


def check_disk(folder: Path, content: Content = STATE) -> None:
    """Refuses what isn't a folder on a disk.

    Raises:
        OptionError: Saying what it is.
    """
    kind = _file_system(folder, content)
    if kind in _IN_MEMORY:
        raise _refused(folder, content, f"is in memory ({kind}), not on a disk", "Give a folder on a disk.")


def _file_system(folder: Path, content: Content) -> str:
    """The kind of a folder's file system, such as `ext4`; empty where the system doesn't tell."""
    try:
        device = folder.stat().st_dev
    except OSError as error:
        raise _refused(
            folder, content, f"isn't there: {os.strerror(error.errno or 0)}", "Make the folder first."
        ) from error
    if not folder.is_dir():
        raise _refused(folder, content, "is a file", "Give a folder.")
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    parts = (line.split(" - ", 1) for line in mounts)
    kinds = {own.split()[2]: theirs.split()[0] for own, theirs in parts}
    return kinds.get(f"{os.major(device)}:{os.minor(device)}", "")


def _refused(folder: Path, content: Content, what: str, way_out: str) -> OptionError:
    return OptionError(f"the folder `{folder}` {what}.\n  {content.has('in a file there')}\n  {way_out}")


def _free(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free
    return 0


def _reserve(file: int, nbytes: int) -> None:
    """Takes the room of a file, zeroed."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, nbytes)
    else:
        os.truncate(file, nbytes)


def _pieces(ranges: Sequence[FileRange]) -> Iterator[FileRange]:
    """Joins ranges that follow each other in the file and in the buffer, and cuts them for threads."""
    joined: list[FileRange] = []
    for each in ranges:
        last = joined[-1] if joined else None
        if last is not None and (last.offset + last.nbytes, last.at + last.nbytes) == (each.offset, each.at):
            joined[-1] = FileRange(last.offset, last.nbytes + each.nbytes, last.at)
        else:
            joined.append(each)
    for offset, nbytes, at in joined:
        for start in range(0, nbytes, _PIECE):
            yield FileRange(offset + start, min(_PIECE, nbytes - start), at + start)


def _pread(file: int, buffers: list[memoryview], offset: int) -> int:
    os.lseek(file, offset, os.SEEK_SET)
    data = os.read(file, len(buffers[0]))
    buffers[0][: len(data)] = data
    return len(data)


def _pwrite(file: int, buffers: list[memoryview], offset: int) -> int:
    os.lseek(file, offset, os.SEEK_SET)
    return os.write(file, buffers[0])


def large_enough(file: ScratchFile | None, folder: Path, nbytes: int) -> ScratchFile:
    """A file for activations of so many bytes: one that is there, or another, before which the one there is closed.

    Raises:
        OptionError: See `ScratchFile`.
    """
    if file is not None and file.nbytes >= nbytes:
        return file
    if file is not None:
        file.close()
    return ScratchFile(folder, nbytes, ACTIVATIONS)
