"""The heap of the C library, in which torch keeps tensors of the host."""

from __future__ import annotations

import ctypes
from typing import Any


def return_free_memory() -> None:
    """Gives memory that was freed, but that the C library keeps for later, back to the system.

    glibc keeps freed tensors below 32 MiB in its heap. Where what is long-lived was made between them, these holes
    stay: after a first step of AdamW the process held a quarter more than its tensors.
    """
    trim = getattr(_C_LIBRARY, "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def map_large_blocks(nbytes: int = 1 << 20) -> None:
    """Makes the C library map each block of at least so many bytes on its own, and unmap it when it is freed.

    By itself glibc comes to do so from 32 MiB on only. Smaller ones that an update makes and drops, on several threads,
    leave holes: after some steps 4 to 9 % of all that a step holds. What is mapped anew costs page faults: an unfused
    AdamW takes a third longer, a fused one no longer. It concerns the whole process, for good.

    Args:
        nbytes: Smallest block that is mapped on its own.
    """
    option = getattr(_C_LIBRARY, "mallopt", None)
    if option is not None:
        option(_MMAP_THRESHOLD, ctypes.c_int(nbytes))


_MMAP_THRESHOLD = ctypes.c_int(-3)


def _c_library() -> Any:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # of Windows, which has no such heap
        return None


_C_LIBRARY = _c_library()
