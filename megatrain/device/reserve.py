"""The reserve: memory of an accelerator that is taken during a step, but that no schedule can count."""

from __future__ import annotations

import re

GIB = 1 << 30
MIB = 1 << 20
SEGMENTS = 3 * (2 * MIB + 20 * MIB)
"""torch's allocator cuts small tensors from segments of 2 MiB and larger ones from segments of 20 MiB; each stream has
a pool of both, and the last segment of a pool is partly empty. Three streams have pools: compute has one always, a
transfer only where it has to rearrange a tensor."""


def of_card(nbytes: int) -> int:
    """How much of an accelerator's memory stays free of schedules.

    That is for the context, libraries' workspaces, rounding (each tensor to 512 bytes, large ones to 2 MiB), holes
    between tensors, and private buffers of kernels.
    """
    return max(nbytes // 10, min(GIB, nbytes // 4))


def beside(nbytes: int) -> int:
    """The reserve of the smallest card on which a schedule may take `nbytes`."""
    return max(-(-nbytes // 9), GIB)


def cublas_workspace(capability: tuple[int, int], config: str | None) -> int:
    """Bytes of a workspace of cuBLAS, as torch makes it.

    Args:
        capability: Of the GPU, such as `(9, 0)`.
        config: `CUBLAS_WORKSPACE_CONFIG`, such as `":4096:2:16:8"`: pairs of KiB and a count; None for torch's default.
    """
    pairs = re.findall(r":(\d+):(\d+)", config or "")
    if pairs:
        return sum(1024 * int(kib) * int(count) for kib, count in pairs)
    return 32 * MIB if capability[0] >= 9 else 8 * MIB + 128 * 1024
