"""The caches of this machine, as its system tells them."""

from __future__ import annotations

from pathlib import Path

from megatrain.base.host_limits import cache_bytes


def written(root: Path, processor: int, caches: dict[int, tuple[str, str]]) -> None:
    for number, (level, (size, shared)) in enumerate(caches.items()):
        folder = root / f"sys/devices/system/cpu/cpu{processor}/cache/index{number}"
        folder.mkdir(parents=True)
        for name, text in {"level": str(level), "size": size, "shared_cpu_list": shared}.items():
            (folder / name).write_text(f"{text}\n")


def test_the_last_level_of_each_group_of_processors_counts_once(tmp_path: Path):
    for processor in range(4):
        last = "0-1" if processor < 2 else "2-3"
        written(tmp_path, processor, {1: ("48K", str(processor)), 2: ("2048K", str(processor)), 3: ("32768K", last)})
    assert cache_bytes(tmp_path) == 2 * (32 << 20)
