"""Streams, host store, parks and arena on an accelerator."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megatrain.device import Device, find
from megatrain.errors import ExecuteError
from megatrain.memory.bus import Bus
from megatrain.runtime.stores.device_arena import DeviceArena
from megatrain.runtime.stores.host_store import HostStore, image
from megatrain.runtime.stores.parks import ParkPool
from megatrain.runtime.streams.stream_set import Chaos, Event, StreamSet
from megatrain.sizes import aligned
from megatrain.tracer.spec import TensorSpec

NUM_BLOCKS = 16


def accelerator() -> Device:
    return find(None)


def blocks_of(size: int) -> list[dict[str, nn.Parameter]]:
    return [
        {f"{b}.w": nn.Parameter(torch.randn(size, size)), f"{b}.b": nn.Parameter(torch.randn(3))}
        for b in range(NUM_BLOCKS)
    ]


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


class Chain:
    """Blocks streamed through two slots; every value is parked, the last one comes back."""

    def __init__(self, device: Device, chaos: Chaos | None) -> None:
        self.blocks = blocks_of(512)
        self.device = device
        self.images = [image([(k, TensorSpec.of(t)) for k, t in block.items()]) for block in self.blocks]
        bus = Bus(device)
        self.start = torch.ones(4, 512, device=device.torch_device)
        self.store = HostStore(self.images, {k: t for block in self.blocks for k, t in block.items()}, bus)
        self.store.lock()
        self.arena, self.pool = DeviceArena(device), ParkPool(bus)
        self.slot_bytes = -(-self.images[0].nbytes // 256) * 256
        self.arena.resize(2 * self.slot_bytes)
        self.streams = StreamSet(device, chaos=chaos)

    def plain(self) -> torch.Tensor:
        value = self.start
        for index, block in enumerate(self.blocks):
            value = torch.tanh(value @ block[f"{index}.w"].detach().to(self.device.torch_device))
        return value

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        (parks,) = self.pool.take(NUM_BLOCKS * aligned(self.start.nbytes), 1)
        values, found, free, parked = {-1: self.start}, [], [], []
        streams, store, last = self.streams, self.store, str(NUM_BLOCKS - 1)

        def forward(b: int, slot: torch.Tensor) -> None:
            values[b] = torch.tanh(values.pop(b - 1) @ store.views(self.images[b], slot)[0])

        with streams.step():
            for b, layout in enumerate(self.images):
                slot = self.arena.slot(b % 2 * self.slot_bytes, layout.nbytes)
                w, f, a = Event(f"W{b}"), Event(f"F{b}"), Event(f"A{b}")
                waits = free[b - 2 : b - 1] if b > 1 else ()
                streams.h2d.submit(w.label, partial(store.prefetch, layout, slot), waits, w)
                streams.compute.run(f.label, partial(forward, b, slot), (w, *parked), f)
                # The value leaves the device before the next block drops it.
                streams.d2h.submit(
                    a.label, lambda b=b: parks.put(str(b), values[b], b * aligned(self.start.nbytes)), (f,), a
                )
                parked = [a]
                free.append(f)
            back, end = Event("back"), Event("end")
            returned = torch.empty_like(self.start)
            streams.h2d.submit("back", lambda: parks.get(last, returned), (a,), back)
            streams.compute.run("end", lambda: found.append(returned * 1), (back,), end)
        parked = torch.empty_like(self.start)
        parks.get(last, parked)
        parks.give()
        return found[0], parked.cpu()


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_streamed_chain_equals_the_plain_one(seed: int | None):
    chain = Chain(accelerator(), None if seed is None else Chaos(seed))
    expected = chain.plain()
    for _ in range(5):
        found, parked = chain.run()
        assert torch.equal(found, expected)
        assert torch.equal(parked, expected.cpu())
    chain.streams.close()


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
