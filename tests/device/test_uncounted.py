"""What no allocator of torch's counts, by the device that takes it."""

from __future__ import annotations

import pytest
import torch

from megatrain.device import Accelerator, Cuda
from megatrain.device.accelerator import MIB


def test_both_threads_that_compute_have_a_workspace_of_cublas(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {0: (8, 0), 1: (9, 0)}[device.index])
    others = Accelerator("xpu", 0).uncounted()
    assert Cuda(1).uncounted() == (("cuBLAS workspaces", 2 * 32 * MIB), *others)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert Cuda(0).uncounted() == (("cuBLAS workspaces", 2 * 32 * MIB), *others)
