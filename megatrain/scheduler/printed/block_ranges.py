"""Numbers of blocks as ranges."""

from __future__ import annotations

from collections.abc import Sequence


def ranges(blocks: Sequence[int]) -> list[str]:
    """Ascending numbers as texts, runs of them as one: `0-3`."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][1] + 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    return [f"{a}" if a == b else f"{a}-{b}" for a, b in runs]
