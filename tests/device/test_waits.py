"""How the host waits for a device: for the right one, and asleep where the device can wake it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.device import Cuda, cuda


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
    monkeypatch.setattr(cuda, "_waiting", threading.local())
    slept = [{"blocking": True}, "stream of cuda:1", "slept"]
    device = Cuda(1)
    device.synchronize()
    assert log == slept
    # For an event the thread has a stream that waits for it, of the same device; none for an event that is over.
    waiting = SimpleNamespace(wait_event=lambda event: log.append(event))
    monkeypatch.setattr(torch.cuda, "Stream", lambda of: log.append(f"made for {of}") or waiting)
    del log[:]
    device.wait_for(SimpleNamespace(query=lambda: True))
    assert log == []
    event = SimpleNamespace(query=lambda: False)
    device.wait_for(event)
    device.wait_for(event)
    assert log == ["made for cuda:1", *2 * [event, {"blocking": True}, waiting, "slept"]]
