"""The processors that updates on the host may take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatrain.memory.control_groups import control_groups


def update_threads(leave: int = 1, root: Path = Path("/")) -> int:
    """Returns how many threads updates take: as many as this process has processors, less those left to others.

    Inside a container the process may see all processors of the machine, and get the time of a few. A process with more
    threads is stopped until the next period, and with it those that launch the device's work.

    Args:
        leave: Processors left to the threads that launch and transfer; at most half of all are left.
        root: Where `proc` and `sys` are mounted; for tests.

    Returns:
        At least 1.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Of a part of a processor nothing is left for one more thread.
    count = max(1, int(min([float(allowed), *_quotas(root)])))
    return count - min(leave, count // 2)


def _quotas(root: Path) -> Iterator[float]:
    """The processors that each control group above this process allows it, such as 1.5."""
    for version, group in control_groups("cpu", root):
        try:
            if version == 2:
                quota, period = (group / "cpu.max").read_text().split()
            else:
                quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            # Without a limit the one version says max, the other -1.
            if quota != "max" and int(quota) > 0 and int(period) > 0:
                yield int(quota) / int(period)
        except (OSError, ValueError):
            continue
