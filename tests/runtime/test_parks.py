"""Values parked on the host come back with their bits."""

from __future__ import annotations

import pytest
import torch

from megatrain.device import Cpu
from megatrain.memory.bus import Bus
from megatrain.runtime.stores.parks import ParkPool
from megatrain.sizes import aligned
from tests.runtime.strict_toy import StrictToy

CPU = Cpu()


def test_parked_values_come_back():
    pool = ParkPool(Bus(CPU))
    values = {"x": torch.randn(3, 5), "y": torch.arange(4), "z": torch.randn(4, 6).t(), "e": torch.empty(0)}
    sizes = [aligned(tensor.nbytes) for tensor in values.values()]
    (parks,) = pool.take(sum(sizes), 1)
    assert parks.nbytes == sum(sizes)
    for index, (name, tensor) in enumerate(values.items()):
        parks.put(name, tensor, sum(sizes[:index]))
    for name, tensor in values.items():
        back = torch.empty_like(tensor)
        parks.get(name, back)
        assert torch.equal(back, tensor)


def test_parks_are_reused_between_calls():
    pool = ParkPool(Bus(CPU))
    (parks,) = pool.take(4032, 1)
    parks.put("x", torch.ones(1000), 0)
    address = parks._places["x"].data_ptr()
    parks.give()
    parks.give()
    assert (parks.nbytes, pool.idle_bytes) == (0, 4032)
    (again,) = pool.take(4032, 1)
    again.put("y", torch.ones(1000), 0)
    assert again._places["y"].data_ptr() == address
    assert pool.idle_bytes == 0


def test_parks_of_calls_under_way_are_apart():
    pool = ParkPool(Bus(CPU))
    (one,), (two,) = pool.take(64, 1), pool.take(64, 1)
    one.put("x", torch.zeros(8), 0)
    two.put("x", torch.ones(8), 0)
    found = torch.empty(8)
    one.get("x", found)
    assert found.sum() == 0


def test_dropped_parks_return_to_the_pool_and_nothing_is_hoarded():
    pool = ParkPool(Bus(CPU))
    for length in range(1, 50):
        (parks,) = pool.take(length * 64, 1)
        parks.put("x", torch.ones(length * 16), 0)
        del parks
        assert pool.idle_bytes == length * 64


def test_the_largest_memory_is_kept_and_calls_take_parts_of_it():
    toy = StrictToy()
    pool = ParkPool(Bus(toy))
    for _ in range(3):
        for length, num_calls in ((1, 4), (5, 1), (2, 3), (5, 2), (11, 1)):
            calls = pool.take(length * 64, num_calls)
            for number, parks in enumerate(calls):
                assert parks.nbytes == length * 64
                parks.put("x", torch.full((1,), float(number)), (length - 1) * 64)
            toy.synchronize()
            found = torch.empty(1)
            for number, parks in enumerate(calls):
                parks.get("x", found)
                assert found.item() == number
            calls[0].give()
            assert pool.idle_bytes == 0 or num_calls == 1, "the calls of a run share memory, which the last gives back"
            for parks in calls:
                parks.give()
    assert pool.idle_bytes == 11 * 64
    assert toy.num_locks == 5, "4, 5, 6, 10 and 11 lines of 64 bytes, none of them twice"
    assert len(toy.locked) == 1


def test_nothing_parked_takes_nothing():
    pool = ParkPool(Bus(CPU))
    (parks,) = pool.take(0, 1)
    assert parks.nbytes == 0
    parks.give()
    assert pool.idle_bytes == 0


def test_more_than_announced_is_our_mistake():
    (parks,) = ParkPool(Bus(CPU)).take(64, 1)
    parks.put("x", torch.ones(16), 0)
    parks.put("x", torch.zeros(16), 0)
    with pytest.raises(AssertionError, match="more is parked"):
        parks.put("y", torch.ones(1), 64)
