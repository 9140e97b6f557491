"""The size of the processors' caches."""

from __future__ import annotations

from pathlib import Path

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cache_bytes(root: Path = Path("/")) -> int:
    """Bytes of all last-level caches of the machine; 0 where the system doesn't tell.

    Several processors share a cache, and a large machine has several of them.

    Args:
        root: Where `sys` is mounted; for tests.
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
    return path.read_text().strip()
