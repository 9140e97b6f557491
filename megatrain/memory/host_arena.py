"""HostArena: host memory of an exact size, page-locked if an accelerator gains from locking."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megatrain.device.host_pages import HostPages
from megatrain.device.interface import Device


class HostArena:
    """Host memory of exactly `nbytes`, zeroed; only the last page is rounded up, by the system.

    torch's own page-locked allocator rounds every block up to a power of two, up to twice the memory. The
    memory is released when the arena is closed or dropped *and* no tensor views it any more.

    Args:
        nbytes: Size in bytes; 0 is allowed.
        pin: Device whose transfers may gain from page-locked memory; None leaves it pageable.

    Raises:
        ExecuteError: If the memory can't be allocated or locked.
    """

    def __init__(self, nbytes: int, *, pin: Device | None = None) -> None:
        self.is_pinned = False
        self._pages: HostPages | None = None
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if nbytes:
            self._pages = HostPages.of(nbytes)
            self.tensor = self._pages.tensor()
        if pin is not None:
            self.pin(pin)

    @property
    def nbytes(self) -> int:
        """Size in bytes; 0 once closed."""
        return self.tensor.numel()

    def part(self, start: int, end: int) -> torch.Tensor:
        """Returns bytes `start` to `end` as a `uint8` tensor with a storage of its own over the same memory.

        Tools that save tensors go by storages: a slice of `tensor` would take the whole arena along, and two of them
        would count as one tensor under two names.
        """
        if start == end:
            return torch.empty(0, dtype=torch.uint8)  # there is no buffer of no bytes
        assert self._pages is not None
        return torch.frombuffer(self._pages, dtype=torch.uint8, count=end - start, offset=start)

    def pin(self, device: Device) -> None:
        """Page-locks the memory for transfers with `device`, if they gain from that; makes all pages resident then.

        Raises:
            ExecuteError: If the system refuses.
        """
        if self._pages is None or self.is_pinned:
            return
        self._pages.unlock = device.lock(self.tensor.data_ptr(), self.nbytes)
        self.is_pinned = self._pages.unlock is not None

    def close(self) -> None:
        """Lets go of the memory; tensors that view it keep it until they are gone."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._pages = None
        self.is_pinned = False


def scratch(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns memory for a piece of a file, in pages of its own, which go back to the system with it.

    On the heap small objects would settle in the hole that each piece leaves.
    """
    return HostArena(math.prod(shape) * dtype.itemsize).tensor.view(dtype).view(tuple(shape))
