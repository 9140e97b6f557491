"""A toy device that takes page-locking seriously: it counts, limits and refuses it, and copies only what is locked."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megatrain.errors import ExecuteError
from tests.extending.test_device import Toy

PAGE = mmap.PAGESIZE


class StrictToy(Toy):
    """Copies from and to one piece of locked memory only, as a driver does.

    Args:
        lock_bytes: Most bytes of one piece.
        limit: Bytes that the system lets lock in all.
        num_refusals: How many locks it refuses first.
    """

    def __init__(self, lock_bytes: int = 1 << 40, limit: int = 1 << 40, num_refusals: int = 0):
        super().__init__()
        self.lock_bytes, self.limit, self.num_refusals = lock_bytes, limit, num_refusals
        self.locked: dict[int, int] = {}
        self.num_locks = self.num_refused = 0
        self.num_pageable = 0
        self.threads: set[str] = set()
        self.allows_pageable = False

    def lock(self, address: int, nbytes: int) -> Callable[[], None]:
        assert address % PAGE == 0
        assert 0 < nbytes <= self.lock_bytes
        end = address - -nbytes // PAGE * -PAGE
        assert all(end <= a or a - -n // PAGE * -PAGE <= address for a, n in self.locked.items()), "pieces overlap"
        if self.num_refused < self.num_refusals or sum(self.locked.values()) + nbytes > self.limit:
            self.num_refused += 1
            raise ExecuteError("refused.\n  There is a limit.\n  Raise it.")
        self.locked[address] = nbytes
        self.num_locks += 1
        self.threads.add(threading.current_thread().name)
        return partial(self.unlocked, address)

    def unlocked(self, address: int) -> None:
        del self.locked[address]

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> Any:
        within = [self.is_within(t) for t in (out, source)]
        if not any(within):
            assert self.allows_pageable, "a copy with memory that isn't locked"
            self.num_pageable += 1
        return super().copy(out, source)

    def is_within(self, tensor: torch.Tensor) -> bool:
        """Whether all of it is in one piece; fails where it is in two."""
        if not tensor.nbytes:
            return True
        start = tensor.data_ptr()
        end = start + tensor.nbytes
        met = [(a, n) for a, n in self.locked.items() if a < end and start < a + n]
        assert len(met) <= 1, "a copy spans two pieces"
        return bool(met) and met[0][0] <= start and end <= sum(met[0])
