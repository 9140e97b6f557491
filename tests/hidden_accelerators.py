"""Hides this machine's accelerators from a process of tests, and from the processes that it starts."""

from __future__ import annotations

import os

# What CUDA, ROCm and Intel's runtimes read: the accelerators that they show to a process.
SHOWN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def hide_accelerators() -> None:
    """Must be called before torch asks for one."""
    os.environ.update(dict.fromkeys(SHOWN, ""))
