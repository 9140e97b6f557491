"""Streams and page-locked memory on an accelerator."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch

from megatrain.device import Device, find
from megatrain.errors import ExecuteError
from megatrain.memory.bus import Bus
from megatrain.runtime.streams.stream_set import Event, StreamSet


def accelerator() -> Device:
    return find(None)


def test_an_arena_is_page_locked_until_its_last_view_goes():
    arena = Bus(accelerator()).arena(100_001)
    assert arena.is_locked
    assert arena.tensor.is_pinned()
    view = arena.tensor[64:]
    del arena
    gc.collect()
    assert view.is_pinned()
    for _ in range(50):
        Bus(accelerator()).arena(1 << 22).close()


def test_a_failure_leaves_the_device_usable():
    device = accelerator()
    streams = StreamSet(device)
    too_large: Any = partial(torch.empty, 1 << 62, device=device.torch_device)
    fits: Any = partial(torch.ones, 3, device=device.torch_device)
    for _ in range(3):
        streams.h2d.submit("W0", too_large, (), Event("W0"))
        with pytest.raises(ExecuteError, match="h2d:W0 failed"):
            streams.finish()
        with streams.step():
            streams.d2h.submit("G0", lambda: fits().to("cpu"), (), Event("G0"))
    streams.close()
