"""The private names of torch's allocator for CUDA: no number depends on them, so a torch without them isn't refused."""

from __future__ import annotations

import torch


def end_capture_of_memory(device_index: int, pool: tuple[int, int]) -> None:
    """Ends the allocations for a CUDA graph whose capture CUDA has given up: `capture_end` raises before it does so.

    Otherwise torch's allocator takes the capture for going on: it refuses the next one into the same pool, and gives
    back no memory that another stream has used.

    Raises:
        RuntimeError: If they have ended.
    """
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        end(device_index, pool)
