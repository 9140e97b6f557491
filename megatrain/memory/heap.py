"""The heap of the C library, in which torch keeps tensors of the host."""

from __future__ import annotations

import ctypes
from typing import Any


def return_free_memory() -> None:
    """Gives memory that was freed, but that the C library keeps for later, back to the system.

    glibc keeps freed tensors below 32 MiB in its heap. If long-lived tensors were made between them, these holes stay:
    after a first step of AdamW the process held a quarter more than its tensors.
    """
    trim = getattr(_C_LIBRARY, "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _c_library() -> Any:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # of Windows, which has no such heap
        return None


_C_LIBRARY = _c_library()
