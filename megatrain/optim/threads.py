"""How many threads the updates on the host may take."""

from __future__ import annotations

import os


def update_threads(leave: int = 1) -> int:
    """Returns how many processors this process may use, less those left to compute and issue transfers; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, allowed - leave)
