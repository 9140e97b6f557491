"""The arena: one allocation, cut into slots, reused and given back."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from megatrain.device import Cpu
from megatrain.memory.device_budget import DeviceBudget
from megatrain.runtime.engine import Engine
from megatrain.runtime.stores.device_arena import DeviceArena, Meter

CPU = Cpu()


def test_an_arena_has_the_exact_size_and_an_aligned_start():
    arena = DeviceArena(CPU)
    assert arena.nbytes == 0
    arena.resize(12345)
    assert arena.nbytes == 12345
    assert arena.slot(0, 12345).untyped_storage().nbytes() == 12345
    assert arena.slot(0, 1).data_ptr() % 256 == 0


def test_an_arena_of_another_size_has_other_memory():
    arena = DeviceArena(CPU)
    arena.resize(100)
    before = arena.slot(0, 100).fill_(7)
    arena.resize(200)
    assert arena.nbytes == 200
    assert arena.slot(0, 100).data_ptr() != before.data_ptr()
    assert before.tolist() == [7] * 100, "an old view must stay readable"
    arena.resize(5)
    assert arena.nbytes == 5


@pytest.mark.parametrize(
    ("needed", "scheduled", "expected"),
    [
        (101, 300, 101),  # it grows
        (40, 900, 100),  # the rest of the schedule has room beside it
        (40, 940, 100),
        (40, 941, 40),  # it is in the way
    ],
)
def test_an_arena_grows_and_shrinks_only_when_it_must(needed: int, scheduled: int, expected: int):
    engine = Engine(nn.Linear(2, 2), CPU, budget=DeviceBudget(CPU, 1000))
    engine.reserve_slots(100, 1000)
    before = engine.arena.slot(0, 100).data_ptr()
    engine.reserve_slots(needed, scheduled)
    assert engine.arena.nbytes == engine.meter.current == expected
    if expected == 100:
        assert engine.arena.slot(0, 100).data_ptr() == before


def test_views_that_an_arena_keeps_end_with_its_memory():
    arena = DeviceArena(CPU)
    arena.resize(100)
    view = weakref.ref(arena.kept_views("first", lambda: [arena.slot(0, 8)])[0])
    assert arena.kept_views("first", list) == [view()]
    arena.resize(200)
    gc.collect()
    assert view() is None
    assert arena.kept_views("first", lambda: [arena.slot(0, 8)])[0].data_ptr() == arena.slot(0, 8).data_ptr()


def test_slots_are_views_of_their_range():
    arena = DeviceArena(CPU)
    arena.resize(1024)
    arena.slot(0, 1024).zero_()
    arena.slot(256, 64).fill_(1)
    assert arena.slot(0, 1024).sum().item() == 64
    assert arena.slot(256, 64).view(torch.float32).shape == (16,)
    assert arena.slot(1024, 0).numel() == 0


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 4), (0, 65), (64, 1), (8, -4)])
def test_slots_outside_the_arena_are_our_mistake(offset: int, nbytes: int):
    arena = DeviceArena(CPU)
    arena.resize(64)
    with pytest.raises(AssertionError, match="outside"):
        arena.slot(offset, nbytes)


def test_a_meter_counts_each_storage_once():
    meter = Meter()
    base = torch.empty(1000, dtype=torch.uint8)
    meter.hold("a", [base[:10], base[500:].view(torch.int32)])
    assert meter.current == 1000
    meter.hold("b", [base])
    assert meter.current == 1000
    meter.release("a")
    assert meter.current == 1000
    meter.release("b")
    assert (meter.current, meter.peak) == (0, 1000)


def test_a_meter_counts_the_real_size_of_a_storage():
    meter = Meter()
    meter.hold("a", [torch.empty(8).expand(100, 8), torch.empty(0), torch.empty(4, dtype=torch.float64)])
    assert meter.current == 32 + 32


def test_a_meter_of_another_device_leaves_the_host_out():
    meter, tensor = Meter(counts_host=False), torch.empty(8)
    meter.hold("a", [tensor])
    assert (meter.current, meter.peak, meter.has(tensor)) == (0, 0, False)
    meter.release("a")


def test_holding_a_key_again_replaces_what_it_held():
    meter = Meter()
    old, new = torch.empty(100, dtype=torch.uint8), torch.empty(30, dtype=torch.uint8)
    meter.hold("g", [old])
    meter.hold("g", [new])
    assert (meter.current, meter.peak) == (30, 130)
    meter.hold("g", [new])
    assert meter.current == 30
    meter.hold("g", [])
    assert meter.current == 0
    meter.release("g")
    meter.release("never held")
    assert meter.current == 0


def test_the_peak_can_be_measured_anew():
    meter = Meter()
    meter.set_arena(1000)
    tensor = torch.empty(50, dtype=torch.uint8)
    meter.hold("a", [tensor])
    meter.set_arena(400)
    assert (meter.current, meter.peak) == (450, 1050)
    meter.reset_peak()
    assert meter.peak == 450
    meter.clear()
    assert (meter.current, meter.peak) == (400, 450)


def test_a_meter_keeps_nothing_alive():
    meter = Meter()
    tensor = torch.empty(10)
    kept = weakref.ref(tensor)
    meter.hold("a", [tensor])
    del tensor
    assert kept() is None
    assert meter.current == 40
    meter.release("a")
    assert meter.current == 0


def test_the_parts_of_a_sparse_tensor_are_counted():
    meter = Meter()
    sparse = torch.eye(4).to_sparse_coo()
    meter.hold("s", [sparse])
    assert meter.current == sparse._indices().untyped_storage().nbytes() + sparse._values().untyped_storage().nbytes()


def test_a_meter_adds_up_over_threads():
    meter = Meter()
    tensors = [torch.empty(16, dtype=torch.uint8) for _ in range(4)]

    def work(name: int) -> None:
        for turn in range(200):
            meter.hold((name, turn), tensors)
            meter.release((name, turn))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (meter.current, meter.peak) == (0, 64)
