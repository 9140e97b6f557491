"""HostPages: memory of the host straight from the system, of an exact size."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch

from megatrain.errors import ExecuteError
from megatrain.sizes import format_bytes


class HostPages(mmap.mmap):
    """Anonymous memory, zeroed, that is unlocked before it is unmapped.

    A weakref callback would come too late: `mmap` unmaps first and clears its weak references then.

    Attributes:
        unlock: Called before the memory goes, if it was page-locked.
    """

    unlock: Callable[[], None] | None = None

    @staticmethod
    def of(nbytes: int) -> HostPages:
        """Maps `nbytes`, at least 1.

        Raises:
            ExecuteError: If the host has no more.
        """
        try:
            return HostPages(-1, nbytes)
        except (OSError, OverflowError, ValueError) as error:
            raise ExecuteError(f"the host can't allocate {format_bytes(nbytes)} of memory: {error}") from error

    def tensor(self) -> torch.Tensor:
        """All of it as `uint8`. The storage of this tensor, and so every view of it, keeps the pages alive."""
        return torch.frombuffer(self, dtype=torch.uint8)

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()
