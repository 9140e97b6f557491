"""What this machine allows a process: memory, processors and caches."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

# Files of a control group: its limit, its use, and what of that are pages of files, which the system takes back, as it
# does outside of a group.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_VERSION_2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes of host memory that this process can still take without swapping.

    Inside a container this is the memory left by its control group, or by one above it; the machine may have far more.
    """
    return min([int(psutil.virtual_memory().available), *_left_in_groups(root)])


def locked_bytes(root: Path = Path("/")) -> tuple[int, str] | None:
    """Returns how much memory the system page-locks for a device, and where that is from; None for any amount."""
    if sys.platform == "win32":
        return int(psutil.virtual_memory().total) // 2, "half of the memory, as Windows has it"
    try:
        kernel = (root / "proc/version").read_text(encoding="utf-8")
    except OSError:
        return None
    return (_LOCKED_BY_WSL, "as others measured on WSL2") if "microsoft" in kernel.lower() else None


_LOCKED_BY_WSL = 1 << 30


def _left_in_groups(root: Path) -> Iterator[int]:
    for version, group in control_groups("memory", root):
        left = _left(group, *(_VERSION_1 if version == 1 else _VERSION_2))
        if left is not None:
            yield left


def _left(group: Path, limit: str, use: str, reclaimable: Sequence[str]) -> int | None:
    """Returns what one group leaves; None if it isn't there, or has no limit."""
    try:
        most, used = (group / limit).read_text(encoding="utf-8").strip(), (group / use).read_text(encoding="utf-8")
        stat = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
        pages = sum(int(stat.get(kind, 0)) for kind in reclaimable)
        return None if most == "max" else max(0, int(most) - int(used) + pages)
    except (OSError, ValueError):
        return None


def control_groups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Yields the folders of this process's group and of all groups above it, whose limits count as well.

    Yields:
        The version of control groups, 1 or 2, and a folder, which may not exist.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version, mounts = (1, _mounts_1(root, controller, controllers)) if controllers else (2, [root / _MOUNT])
        group = Path(path.lstrip("/"))
        # A container that doesn't see its own path finds its own group at the top.
        for inner in dict.fromkeys([group, *group.parents]):
            yield from ((version, mount / inner) for mount in mounts)


def _mounts_1(root: Path, controller: str, controllers: str) -> list[Path]:
    """Controllers that are mounted together have a folder of all their names; a link of each name may be missing."""
    return list(dict.fromkeys([root / _MOUNT / controller, root / _MOUNT / controllers]))


_MOUNT = "sys/fs/cgroup"


def update_threads(leave: int = 1, root: Path = Path("/")) -> int:
    """Returns how many threads updates take: as many as this process has processors, less those left to others.

    Inside a container the process may see all processors of the machine, and get the time of a few. A process with more
    threads is stopped until the next period, and with it those that launch the device's work.

    Returns:
        At least 1; `leave` processors, but at most half of all, are left to threads that launch and transfer.
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
                quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
            else:
                quota, period = (_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
            # Without a limit the one version says max, the other -1.
            if quota != "max" and int(quota) > 0 and int(period) > 0:
                yield int(quota) / int(period)
        except (OSError, ValueError):
            continue


_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cache_bytes(root: Path = Path("/")) -> int:
    """Bytes of all last-level caches of the machine; 0 where the system doesn't tell.

    Several processors share a cache, and a large machine has several of them.
    """
    found: dict[str, int] = {}
    for processor in (root / "sys/devices/system/cpu").glob("cpu[0-9]*"):
        try:
            last = max((processor / "cache").glob("index[0-9]*"), key=lambda cache: int(_text(cache / "level")))
            size = _text(last / "size")
            found[_text(last / "shared_cpu_list")] = int(size.rstrip("KMG")) * _UNITS.get(size[-1], 1)
        except (OSError, ValueError):  # no such file, no caches, or another kind of text
            continue
    return sum(found.values())


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip()


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
