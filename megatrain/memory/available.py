"""The available host memory: the machine's, or the part that a control group leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

from megatrain.memory.control_groups import control_groups

# Files of a control group: its limit, its use, and what of that are pages of files, which the system takes back first.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def available_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes of host memory that this process can still take without swapping.

    Inside a container this is the memory left by its control group, or by one above it; the machine may have far more.

    Args:
        root: Where `proc` and `sys` are mounted; for tests.
    """
    return min([int(psutil.virtual_memory().available), *_left_in_groups(root)])


def _left_in_groups(root: Path) -> Iterator[int]:
    for version, group in control_groups("memory", root):
        left = _left(group, *(_VERSION_1 if version == 1 else _VERSION_2))
        if left is not None:
            yield left


def _left(group: Path, limit: str, use: str, reclaimable: str) -> int | None:
    """Returns what one group leaves; None if it isn't there, or has no limit."""
    try:
        most, used = (group / limit).read_text().strip(), (group / use).read_text()
        stat = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
        return None if most == "max" else max(0, int(most) - int(used) + int(stat.get(reclaimable, 0)))
    except (OSError, ValueError):
        return None
