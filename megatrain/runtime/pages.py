"""HostArena: host memory of an exact size, page-locked where an accelerator can use that."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch

from megatrain.errors import ExecuteError
from megatrain.sizes import format_bytes


class _Pages(mmap.mmap):
    """Anonymous memory that is unlocked before it is unmapped.

    A weakref callback would come too late: `mmap` unmaps first and clears its weak references then.
    """

    locked_at: int | None = None

    def __del__(self) -> None:
        if self.locked_at is not None:
            _cudart().cudaHostUnregister(self.locked_at)


class HostArena:
    """Host memory of exactly `nbytes`, zeroed; only the last page is rounded up, by the system.

    torch's own page-locked allocator rounds every block up to a power of two, up to twice the memory. The
    memory is released when the arena is closed or dropped *and* no tensor views it any more.

    Args:
        nbytes: Size in bytes; 0 is allowed.
        pin: Device whose transfers need page-locked memory; None, the CPU and accelerators other than CUDA
            leave it pageable.

    Raises:
        ExecuteError: If the memory can't be had or not be locked.
    """

    def __init__(self, nbytes: int, *, pin: torch.device | None = None) -> None:
        self.is_pinned = False
        self._pages: _Pages | None = None
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if nbytes:
            try:
                self._pages = _Pages(-1, nbytes)
            except (OSError, OverflowError, ValueError) as error:
                raise ExecuteError(f"the host has no {format_bytes(nbytes)} of memory to give: {error}") from error
            # The storage of this tensor, and so every view of it, keeps the pages alive.
            self.tensor = torch.frombuffer(self._pages, dtype=torch.uint8)
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

    def pin(self, device: torch.device) -> None:
        """Page-locks the memory for transfers with `device`, if that is CUDA; makes all pages resident.

        Raises:
            ExecuteError: If the system refuses.
        """
        if device.type != "cuda" or self._pages is None or self.is_pinned:
            return
        address = self.tensor.data_ptr()
        with torch.cuda.device(device):
            code = int(_cudart().cudaHostRegister(address, self.nbytes, 0))
        if code != 0:
            raise ExecuteError(
                f"{format_bytes(self.nbytes)} of host memory can't be page-locked: CUDA error {code}.\n"
                "  Transfers that overlap with compute need page-locked memory.\n"
                "  Raise the limit on locked memory (ulimit -l), or free host memory."
            )
        self._pages.locked_at = address
        self.is_pinned = True

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


def _cudart() -> Any:
    return torch.cuda.cudart()
