"""HostArena: host memory of an exact size, page-locked if an accelerator gains from locking."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megatrain.device.host_pages import HostPages, give_back, whole_pages
from megatrain.device.interface import Device
from megatrain.errors import ExecuteError

_locking = threading.RLock()


class HostArena:
    """Host memory of exactly `nbytes`, zeroed; only the last page is rounded up, by the system.

    torch's own page-locked allocator rounds every block up to a power of two, up to twice the memory. The
    memory is released when the arena is closed or dropped *and* no tensor views it any more.

    Attributes:
        is_refused: The system refused to page-lock it.

    Raises:
        ExecuteError: If the memory can't be allocated.
    """

    def __init__(self, nbytes: int) -> None:
        self.is_locked = self.is_refused = False
        self._pages: HostPages | None = None
        # Of each piece that is locked: its first byte, the one after the last, and what unlocks it.
        self._locked: list[tuple[int, int, Callable[[], None]]] = []
        self._cuts: Sequence[int] = ()
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if nbytes:
            self._pages = HostPages.of(nbytes)
            self.tensor = self._pages.tensor()

    @classmethod
    def over(cls, pages: HostPages) -> HostArena:
        """Returns one of memory that is there already."""
        made = cls(0)
        made._pages, made.tensor = pages, pages.tensor()
        return made

    @classmethod
    def borrowed(cls, tensor: torch.Tensor) -> HostArena:
        """Returns one of the memory of a dense tensor that somebody else holds as well.

        It is never page-locked: its pages have other people's data on them, and children that are forked need those.
        """
        made = cls(0)
        made.tensor, made.is_refused = plain_view(tensor, torch.uint8, (tensor.nbytes,), (1,)), True
        return made

    @classmethod
    def of_file(cls, descriptor: int) -> HostArena | None:
        """Returns one of a whole file, as `HostPages.of_file`; never page-locked, because that would copy its pages."""
        pages = HostPages.of_file(descriptor)
        if pages is None:
            return None
        made = cls.over(pages)
        made.is_refused = True
        return made

    @property
    def nbytes(self) -> int:
        """Size in bytes; 0 once closed."""
        return self.tensor.numel()

    def part(self, start: int, end: int) -> torch.Tensor:
        """Returns bytes `start` to `end` as a `uint8` tensor with a storage of its own over the same memory.

        Tools that save tensors go by storages: a slice of `tensor` would take the whole arena along, and two of them
        would count as one tensor under two names.
        """
        return self.lent_part(start, end)[0]

    def lent_part(self, start: int, end: int) -> tuple[torch.Tensor, weakref.ref[Any]]:
        """As `part`, with a reference that dies when nobody holds that storage any more, in whatever form."""
        if start == end:  # there is no buffer of no bytes
            empty = torch.empty(0, dtype=torch.uint8)
            return empty, weakref.ref(empty)
        assert self._pages is not None
        # The storage holds this view, and the view holds the pages.
        view = memoryview(self._pages)[start:end]
        return torch.frombuffer(view, dtype=torch.uint8), weakref.ref(view)

    def lock(self, device: Device) -> None:
        """Page-locks the memory for transfers with `device`, if they gain from that; makes all pages resident then.

        It may be called on several threads; one locks, and the others wait.

        Raises:
            ExecuteError: If the system refuses; nothing of the arena is locked then.
        """
        with _locking:
            self._lock(device)

    def _lock(self, device: Device) -> None:
        pages, most = self._pages, device.lock_bytes
        if pages is None or self.is_locked or most == 0:
            return
        pages.keep_from_children()
        try:
            self.is_locked = self._lock_pieces(device, 0, self.nbytes)
        finally:
            if not self.is_locked:
                self.unlock()

    def _lock_pieces(self, device: Device, start: int, end: int) -> bool:
        """Locks bytes that aren't; returns whether transfers gain from that."""
        assert self._pages is not None
        self._pages.unlock = partial(_unlock, self._locked, device)
        for first in range(start, end, device.lock_bytes):
            last = min(end, first + device.lock_bytes)
            unlock = device.lock(self.tensor.data_ptr() + first, last - first)
            if unlock is None:
                return False
            self._locked.append((first, last, unlock))
        self._cuts = sorted({edge for piece in self._locked for edge in piece[:2]}.difference({0, self.nbytes}))
        return True

    def unlock(self) -> None:
        """Unlocks the memory, when all that the device has to do is done."""
        with _locking:
            self.is_locked, self._cuts = False, ()
            if self._pages is not None and self._pages.unlock is not None:
                self._pages.unlock()
                self._pages.unlock = None
                self._pages.share_with_children()

    def give_back(self, start: int, end: int, device: Device) -> None:
        """Gives the whole pages of some bytes back to the system, as `host_pages.give_back`; the rest stays locked.

        Copies from and to these bytes are ordinary ones from then on, until `lock_again`. Memory of others stays as it
        is: who has page-locked it isn't known.

        Raises:
            ExecuteError: If the system doesn't lock what it did; nothing of the arena is locked then.
        """
        if self._pages is None:
            return
        address = self.tensor.data_ptr()
        first, last = (edge - address for edge in whole_pages(address + start, end - start))
        with _locking:
            met = [piece for piece in self._locked if piece[0] < last and first < piece[1]]
            self._locked[:] = [piece for piece in self._locked if piece not in met]
            _unlock([*met], device)
            give_back(address + first, last - first)
            for begin, stop, _ in met:
                self._relock(device, begin, min(stop, first))
                self._relock(device, max(begin, last), stop)

    def lock_again(self, start: int, end: int, device: Device) -> None:
        """Page-locks what `give_back` has unlocked.

        Raises:
            ExecuteError: As `give_back`.
        """
        address = self.tensor.data_ptr()
        first, last = (edge - address for edge in whole_pages(address + start, end - start))
        with _locking:
            if self.is_locked and not any(piece[0] < last and first < piece[1] for piece in self._locked):
                self._relock(device, first, last)

    def _relock(self, device: Device, start: int, end: int) -> None:
        if start >= end:
            return
        try:
            self._lock_pieces(device, start, end)
        except ExecuteError:
            self.unlock()
            self.is_refused = True
            raise

    def cuts(self, tensor: torch.Tensor) -> list[int]:
        """Returns the bytes of a tensor of this memory, without gaps, at which another piece is locked."""
        if not self._cuts:  # nearly always
            return []
        start = tensor.data_ptr() - self.tensor.data_ptr()
        return [cut - start for cut in self._cuts if start < cut < start + tensor.nbytes]

    def close(self) -> None:
        """Lets go of the memory; tensors that view it keep it until they are gone."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._pages = None
        self._locked = []
        self._cuts = ()
        self.is_locked = False


def _unlock(pieces: list[tuple[int, int, Callable[[], None]]], device: Device) -> None:
    """Unlocks pieces of an arena. What the device still copies out of it or into it is waited for."""
    with contextlib.suppress(RuntimeError):  # a device that is broken copies nothing
        if pieces:
            device.settle()
    while pieces:
        pieces.pop()[2]()


def plain_view(tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Returns a tensor over the storage of another, from its first byte on, that counts its writes for itself alone."""
    with torch.inference_mode(False):
        offset = tensor.storage_offset() * tensor.element_size() // dtype.itemsize
        return torch.empty(0, dtype=dtype).set_(tensor.untyped_storage(), offset, shape, stride)


def together(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Groups neighbours whose memory can be locked in one piece; what is larger alone stays alone.

    Args:
        sizes: Bytes of each.
        most: Bytes of one piece; 0 for any number.

    Returns:
        The places of each group's members in `sizes`; members without bytes belong to the group before them.
    """
    groups: list[list[int]] = []
    nbytes = 0
    for index, size in enumerate(sizes):
        if not groups or (most and nbytes and size and nbytes + size > most):
            groups.append([])
            nbytes = 0
        groups[-1].append(index)
        nbytes += size
    return groups


def scratch(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns memory for a piece of a file, in pages of its own, which go back to the system with it.

    On the heap small objects would settle in the hole that each piece leaves.
    """
    return HostArena(math.prod(shape) * dtype.itemsize).tensor.view(dtype).view(tuple(shape))
