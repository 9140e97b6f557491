"""SharedMemory: memory that the processes of one host share, and news that they leave for each other in it."""

from __future__ import annotations

import json
import math
import mmap
import os
import threading
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.base.sizes import aligned
from megatrain.device.host_arena import HostArena
from megatrain.device.host_pages import HostPages

# The file has no name, so that nothing is left of it when its processes have ended, however they did: the others open
# it by the process that made it. Each region of it is mapped twice. What one process writes into the shared mapping is
# seen by all of them, in both mappings. What it writes into its private one stays its own: that process has a copy of
# this page from then on, and no longer sees what others write there, until it drops the copy.

PAGE = mmap.PAGESIZE
_REGION = 256 << 20
"""Least bytes of a region: what nobody touches takes no memory, and each region takes two file descriptors."""
_LETTERS, _LETTER = 1 << 40, 1 << 32
"""Where letters begin in the memory of landings, below those of the first rank, and the most bytes of each."""
_TOKEN = 16
"""Bytes at the beginning of the journal by which a process knows the memory that it was told of."""
_MAP_NORESERVE = 0x4000
_SCANNED = 1 << 20
"""Pages whose state is read in one piece."""


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A part of the file.

    Attributes:
        offset: Its first byte in the file.
        shared: Its shared mapping.
        private: Its private mapping.
        arena: Memory of `private`.
    """

    offset: int
    shared: HostPages
    private: HostPages
    arena: HostArena

    def is_written(self, start: int, nbytes: int) -> bool:
        """Whether this process has written any of these bytes in the private mapping."""
        return _has_copies(self.arena.tensor.data_ptr() + start, nbytes)

    def drop(self, start: int, nbytes: int) -> None:
        """Drops this process's copies of these bytes, which begin a page: the private mapping is as the shared one."""
        self.private.madvise(mmap.MADV_DONTNEED, start, aligned(nbytes, PAGE))


class SharedMemory:
    """Memory that the processes of one host share; see above.

    Args:
        contents: A descriptor of the memory.
        journal: A descriptor of the news.
        landings: A descriptor of the memory in which gradients land.
    """

    def __init__(self, contents: int, journal: int, landings: int):
        self._contents, self._journal, self._landings = contents, journal, landings
        self._read = _TOKEN
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        self._free = range(0)
        self._end = weakref.finalize(self, close_all, (contents, journal, landings))

    @staticmethod
    def made() -> SharedMemory:
        """Makes one, without a name.

        Raises:
            OSError: If the system has no such files.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError("the system has no memory without a name that processes share (memfd_create)")
        found = SharedMemory(*(os.memfd_create(f"megatrain-{name}") for name in ("store", "journal", "landings")))
        os.pwrite(found._journal, os.urandom(_TOKEN), 0)
        return found

    @property
    def address(self) -> list[Any]:
        """Where other processes find it: the process, its descriptors there, and what the journal begins with."""
        return [os.getpid(), self._contents, self._journal, self._landings, self._token]

    @property
    def _token(self) -> str:
        return os.pread(self._journal, _TOKEN, 0).hex()

    @staticmethod
    def opened(address: Sequence[Any]) -> SharedMemory:
        """Opens one that another process of this host has made.

        Raises:
            OSError: If it isn't there, as on another host, or this process may not open it.
        """
        process, *descriptors, token = address
        files = (os.open(f"/proc/{process}/fd/{each}", os.O_RDWR | os.O_CLOEXEC) for each in descriptors)
        found = SharedMemory(*files)
        if found._token != token:
            raise OSError(f"process {process} has other files")
        return found

    @contextmanager
    def locked(self) -> Generator[None]:
        """Keeps all other threads and processes out during the body; the system lets go of it if this one ends."""
        import fcntl  # here, because Windows has none; `made` refuses there

        with self._lock:
            fcntl.flock(self._journal, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._journal, fcntl.LOCK_UN)

    def take(self, nbytes: int) -> tuple[Region, int]:
        """Takes zeroed bytes that nobody has, from the start of a page; the caller holds the lock.

        Returns:
            Their region, and where they begin there.
        """
        needed = aligned(nbytes, PAGE)
        if needed > len(self._free):
            offset = os.fstat(self._contents).st_size
            self._free = range(max(needed, _REGION))
            os.ftruncate(self._contents, offset + len(self._free))
            self._latest = self.region(offset, len(self._free))
        start = self._free.start
        self._free = self._free[needed:]
        return self._latest, start

    def region(self, offset: int, nbytes: int) -> Region:
        """Returns a region, mapped once.

        Args:
            offset: Of the region.
            nbytes: Its bytes.
        """
        if offset not in self._regions:
            shared = self.mapped(offset, nbytes)
            private = _mapped(self._contents, offset, nbytes, is_private=True)
            for pages in (shared, private):
                # A child would see what the ranks write from then on, in the middle of their updates: it ends instead.
                pages.keep_from_children()
            self._regions[offset] = Region(offset, shared, private, HostArena.over(private))
        return self._regions[offset]

    def mapped(self, offset: int, nbytes: int) -> HostPages:
        """Maps bytes from the start of a page on, shared."""
        return _mapped(self._contents, offset, nbytes)

    def landing(self, offset: int, nbytes: int) -> HostPages:
        """Maps bytes of the memory of landings, zeroed at first, from the start of a page on."""
        with self.locked():
            end = offset + aligned(nbytes, PAGE)
            if os.fstat(self._landings).st_size < end:
                os.ftruncate(self._landings, end)
        return _mapped(self._landings, offset, nbytes)

    def words(self, offset: int, *shape: int) -> torch.Tensor:
        """Whole numbers of 64 bits in the memory of landings, from the start of a page on."""
        count = math.prod(shape)
        pages = self.landing(offset, 8 * max(count, 1))
        return torch.frombuffer(pages, dtype=torch.int64)[:count].view(shape)

    def write_letter(self, number: int, content: bytes) -> None:
        """Writes a letter in place of the one of this number; the caller holds the lock."""
        os.pwrite(self._landings, content, _LETTERS + number * _LETTER)

    def letter(self, number: int, nbytes: int) -> bytes:
        """Reads a letter of so many bytes."""
        return os.pread(self._landings, nbytes, _LETTERS + number * _LETTER)

    # -- news --------------------------------------------------------------------------------------------------

    def post(self, news: Any) -> None:
        """Leaves news for all others; the caller holds the lock.

        Args:
            news: Numbers, texts, lists and dictionaries.
        """
        line = json.dumps(news).encode() + b"\n"
        os.pwrite(self._journal, line, os.fstat(self._journal).st_size)

    def news(self) -> Iterator[Any]:
        """What was posted since the last call, by this process as well; the caller holds the lock."""
        size = os.fstat(self._journal).st_size
        if size > self._read:
            lines = os.pread(self._journal, size - self._read, self._read)
            self._read = size
            yield from map(json.loads, lines.splitlines())


def _mapped(descriptor: int, offset: int, nbytes: int, *, is_private: bool = False) -> HostPages:
    kind = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
    return HostPages(descriptor, aligned(nbytes, PAGE), flags=kind | _MAP_NORESERVE, offset=offset)


def close_all(descriptors: Sequence[int]) -> None:
    """Closes descriptors."""
    for each in descriptors:
        os.close(each)


def can_tell_copies() -> bool:
    """Whether this system tells which pages of a private mapping are copies, and shows what others write elsewhere."""
    try:
        file = SharedMemory.made()
        with file.locked():
            region, _ = file.take(2 * PAGE)
        region.private[0] = 1
        region.shared[PAGE] = 2
        seen = region.is_written(0, PAGE), region.is_written(PAGE, PAGE), region.private[PAGE]
        region.drop(0, PAGE)
        return (*seen, region.private[0], region.is_written(0, PAGE)) == (True, False, 2, 0, False)
    except (OSError, AttributeError, ValueError):
        return False


def _has_copies(address: int, nbytes: int) -> bool:
    """Whether some of these pages are copies: there, or swapped out, but not of a file."""
    first, last = address // PAGE, (address + nbytes - 1) // PAGE
    with open("/proc/self/pagemap", "rb", buffering=0) as states:
        for start in range(first, last + 1, _SCANNED):
            count = min(_SCANNED, last + 1 - start)
            found = os.pread(states.fileno(), 8 * count, 8 * start)
            if len(found) != 8 * count:
                raise OSError("the system doesn't tell the state of its pages")
            page = torch.frombuffer(bytearray(found), dtype=torch.int64)
            # Bits 63 and 62: there, and swapped out; bit 61: of a file.
            if bool((((page >> 62) & 3).ne(0) & ((page >> 61) & 1).eq(0)).any()):
                return True
    return False


def end_of(process: int) -> int | None:
    """A descriptor that can be read once a process has ended; None where the system has none."""
    if not hasattr(os, "pidfd_open"):
        return None
    with suppress(OSError):
        return os.pidfd_open(process)
    return None
