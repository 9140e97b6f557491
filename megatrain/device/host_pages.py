"""HostPages: memory of the host straight from the system, of an exact size, in huge pages where the system has them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from megatrain.base.sizes import format_bytes
from megatrain.errors import ExecuteError

_HUGE_PAGE = 2 << 20
# Memory of at least so many bytes is for long; less comes and goes, and would cost more to make than to look up.
_HUGE_FROM = 64 << 20
# Of Linux, also where Python doesn't name them.
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_MAP_FIXED_NOREPLACE = 0x100000
_MAP_NORESERVE = 0x4000
# Windows has no such flags, and maps nothing that isn't private unless it gets a name.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
_MOST_THREADS = 8


class HostPages(mmap.mmap):
    """Anonymous memory of this process, zeroed, that is unlocked before it is unmapped.

    A weakref callback would come too late: `mmap` unmaps first and clears its weak references then.

    Attributes:
        unlock: Called before the memory goes, if it was page-locked.
    """

    unlock: Callable[[], None] | None = None
    _address: int = 0
    _process: int = 0

    @staticmethod
    def of(nbytes: int) -> HostPages:
        """Maps `nbytes`, at least 1.

        Raises:
            ExecuteError: If the host has no more.
        """
        try:
            # Shared memory would be in pages of 4 KiB, which take longer to lock and to look up.
            pages = HostPages(-1, nbytes, **_PRIVATE)
        except (OSError, OverflowError, ValueError) as error:
            raise ExecuteError(f"the host can't allocate {format_bytes(nbytes)} of memory: {error}") from error
        if nbytes >= _HUGE_FROM:
            pages._advise("MADV_HUGEPAGE")
        return pages

    @staticmethod
    def of_file(descriptor: int) -> HostPages | None:
        """Maps a whole file, which isn't empty; None where the system has no such maps, or refuses one.

        Reading takes no memory but the system's cache of files, which goes back whenever other memory is needed. What
        is written here isn't written into the file: each page that is written becomes memory of this process.
        """
        if not hasattr(mmap, "MAP_PRIVATE") or sys.platform != "linux":
            return None
        try:
            # Unreserved: a file may be larger than the memory, and pages that nobody writes take none of it.
            return HostPages(descriptor, 0, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE)
        except (OSError, ValueError):
            return None

    def tensor(self) -> torch.Tensor:
        """All of it as `uint8`. The storage of this tensor, and so every view of it, keeps the pages alive."""
        return torch.frombuffer(self, dtype=torch.uint8)

    def keep_from_children(self) -> None:
        """Leaves these pages out of processes that are forked from now on. Called before they are page-locked.

        After a fork the first write into a private page gives the writer a copy. If that were this process, the device
        would go on with the original, which this process no longer sees.
        """
        self._process, self._address = os.getpid(), ctypes.addressof(ctypes.c_char.from_buffer(self))
        _KEPT[self._address] = len(self)
        self._advise("MADV_DONTFORK")

    def share_with_children(self) -> None:
        """The reverse, when the pages aren't page-locked any more."""
        self._advise("MADV_DOFORK")
        _KEPT.pop(self._address, None)

    def _advise(self, name: str) -> None:
        with contextlib.suppress(OSError, AttributeError):  # where there is no such advice, nothing depends on it
            self.madvise(getattr(mmap, name))

    def __del__(
        self, is_ending: Callable[[], bool] = sys.is_finalizing, process: Callable[[], int] = os.getpid
    ) -> None:
        # A forked child has locked nothing, and at its end a process gives back all it has. The device's own functions
        # may fail by then.
        if is_ending() or process() != self._process:
            return
        _KEPT.pop(self._address, None)
        if self.unlock is not None:
            self.unlock()


_KEPT: dict[int, int] = {}
"""Sizes of pages that are kept from children, by address."""


def populate(address: int, nbytes: int) -> None:
    """Makes pages from an address on resident, with several threads, and leaves their contents alone.

    Page-locking would do that on one thread. A kernel without this advice (Linux before 5.14) leaves it to the locking.
    """
    madvise = _c_function("madvise")
    if madvise is None:
        return

    def touch(start: int) -> None:
        madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(min(share, nbytes - start)), _MADV_POPULATE_WRITE)

    num_threads = min(_MOST_THREADS, torch.get_num_threads())
    share = max(1, -(-nbytes // (num_threads * _HUGE_PAGE))) * _HUGE_PAGE
    starts = range(0, nbytes, share)
    if len(starts) == 1:
        touch(0)
        return
    with ThreadPoolExecutor(num_threads) as pool:  # calls through ctypes let other threads run
        list(pool.map(touch, starts))


def fetch(address: int, nbytes: int) -> bool:
    """Has the system read the pages of a mapped file, with several reads under way if several threads call this.

    Returns:
        False if they can't be read, as the file was cut off or its disk fails: touching them would end the process.
    """
    madvise = _c_function("madvise")
    if madvise is None:
        return True
    start = address - address % mmap.PAGESIZE
    size = ctypes.c_size_t(address + nbytes - start)
    # A kernel without this advice (Linux before 5.14) leaves it to those that touch them.
    return madvise(ctypes.c_void_p(start), size, _MADV_POPULATE_READ) == 0 or ctypes.get_errno() != errno.EFAULT


def gives_back() -> bool:
    """Whether the system takes pages back from memory that stays mapped (`give_back`)."""
    return sys.platform == "linux" and _c_function("madvise") is not None


def whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """The first byte, and the one after the last, of the whole pages in some memory; equal if there are none."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    return start, max(start, (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE)


def give_back(address: int, nbytes: int) -> None:
    """Gives the whole pages of some memory back to the system: the values are lost, and the next touch takes new pages.

    The memory is this process's own, and not page-locked: a device would go on with the pages that it knows.
    """
    start, end = whole_pages(address, nbytes)
    madvise = _c_function("madvise")
    if start < end and madvise is not None and gives_back():
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _reserve() -> None:
    """In a forked child: keeps the addresses of pages that it doesn't have from being used for anything else.

    Reading there then ends the child, instead of reading something else, and unmapping them unmaps nothing else.
    """
    reserve = _c_function("mmap")
    if reserve is None:
        return
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    for address, nbytes in _KEPT.items():
        reserve(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 0, flags, -1, ctypes.c_long(0))
    _KEPT.clear()


@cache
def _c_function(name: str) -> Any:
    """A function of the C library, with its errno; None where there is none of this name."""
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, TypeError, AttributeError):
        return None


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_reserve)
