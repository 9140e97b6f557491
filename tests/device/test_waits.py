"""How the host waits for a device: for the right one, and asleep where the device can wake it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.device import Accelerator, Cuda


def test_a_wait_for_cuda_sleeps_on_the_stream_of_its_own_device(monkeypatch: pytest.MonkeyPatch):
    log: list[Any] = []

    class CudaEvent:
        def __init__(self, **options: bool) -> None:
            log.append(options)

        def record(self, stream: str) -> None:
            log.append(stream)

        def synchronize(self) -> None:
            log.append("slept")

    monkeypatch.setattr(torch.cuda, "Event", CudaEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    Cuda(1).synchronize()
    assert log == [{"blocking": True}, "stream of cuda:1", "slept"]


def test_another_accelerator_waits_for_the_stream_of_its_own_device(monkeypatch: pytest.MonkeyPatch):
    log: list[str] = []

    def stream(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: log.append(str(device)))

    monkeypatch.setattr(torch.accelerator, "current_stream", stream)
    Accelerator("xpu", 1).synchronize()
    assert log == ["xpu:1"]
