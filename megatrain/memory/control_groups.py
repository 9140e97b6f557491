"""The control groups that limit this process, as in a container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def control_groups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Yields the folders of this process's group and of all groups above it, whose limits count as well.

    Args:
        controller: What is limited: `"memory"` or `"cpu"`.
        root: Where `proc` and `sys` are mounted; for tests.

    Yields:
        The version of control groups, 1 or 2, and a folder, which may not exist.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
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
