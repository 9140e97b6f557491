"""Page-locked host memory: registration, its limits, and what copies from other memory do."""

from __future__ import annotations

import mmap

import pytest
import torch

from megatrain.device import find
from megatrain.errors import ExecuteError
from megatrain.memory.host_arena import HostArena
from tests.simulated_device.adapter import SimulatedDevice
from tests.simulated_device.simulator import Simulator

KIB = 1 << 10


class Pages:
    """Host memory of whole pages, as `uint8`."""

    def __init__(self, nbytes: int) -> None:
        self.tensor = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        self.address = self.tensor.data_ptr()


def test_codes_are_those_of_cuda(sim: Simulator):
    pages = Pages(64 * KIB)
    assert sim.lock(0, 10) == sim.lock(pages.address, 0) == 1
    assert sim.lock(pages.address, 32 * KIB) == 0
    assert sim.lock(pages.address, 32 * KIB) == 712
    assert sim.lock(pages.address + 16 * KIB, 32 * KIB) == 712
    assert sim.lock(pages.address + 32 * KIB, 32 * KIB) == 0
    assert sim.unlock(pages.address + 8) == 713
    assert sim.unlock(pages.address) == 0
    assert sim.unlock(pages.address) == 713
    assert sim.unlock(pages.address + 32 * KIB) == 0


def test_tensors_in_registered_memory_are_pinned(sim: Simulator):
    pages = Pages(64 * KIB)
    assert not pages.tensor.is_pinned()
    sim.lock(pages.address, 32 * KIB)
    assert pages.tensor[100:].is_pinned()
    assert torch.arange(3).is_pinned() is False
    sim.unlock(pages.address)
    assert not pages.tensor.is_pinned()


def test_the_limit_and_a_failure_on_request(sim: Simulator):
    held = sim.locked_bytes
    pages = Pages(64 * KIB)
    sim.configure(lock_limit=held + 48 * KIB)
    assert sim.lock(pages.address, 64 * KIB) == 2
    assert sim.lock(pages.address, 48 * KIB) == 0
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.empty(1, pin_memory=True)
    sim.unlock(pages.address)
    sim.fail_lock(1, 1)
    assert [sim.lock(pages.address, KIB), sim.lock(pages.address + KIB, KIB), sim.lock(pages.address + KIB, KIB)] == [
        0,
        1,
        0,
    ]
    sim.unlock(pages.address)
    sim.unlock(pages.address + KIB)
    assert sim.locked_bytes == held


@pytest.mark.parametrize("to_device", [True, False])
def test_a_copy_over_the_end_of_a_registration_is_invalid(sim: Simulator, to_device: bool):
    pages, there = Pages(64 * KIB), torch.zeros(64 * KIB, dtype=torch.uint8, device="sim")
    sim.lock(pages.address, 32 * KIB)
    sim.lock(pages.address + 32 * KIB, 32 * KIB)

    def copy(begin: int, end: int) -> None:
        host, device = pages.tensor[begin:end], there[begin:end]
        device.copy_(host, non_blocking=True) if to_device else host.copy_(device, non_blocking=True)

    copy(0, 32 * KIB)
    copy(32 * KIB, 64 * KIB)
    with pytest.raises(RuntimeError, match="invalid argument"):
        copy(16 * KIB, 48 * KIB)
    torch.accelerator.synchronize()
    sim.unlock(pages.address)
    sim.unlock(pages.address + 32 * KIB)


def test_copies_of_locked_memory_do_not_wait(sim: Simulator):
    sim.order("late")
    host, back = torch.ones(1 << 20).pin_memory(), torch.zeros(1 << 20).pin_memory()
    with sim.synchronizations() as found:
        there = torch.zeros(1 << 20, device="sim")
        there.copy_(host, non_blocking=True)
        back.copy_(there, non_blocking=True)
        assert back.sum() == 0
        host.fill_(3)  # too early: the device hasn't read it
    assert found == []
    torch.accelerator.synchronize()
    assert back[0] == 3


def test_a_small_copy_from_other_memory_is_read_at_once(sim: Simulator):
    sim.order("late")
    host, there = torch.ones(100), torch.zeros(100, device="sim")
    with sim.synchronizations() as found:
        there.copy_(host, non_blocking=True)
    host.fill_(3)
    assert found == []
    assert sim.pending(torch.accelerator.current_stream()) > 0
    assert there.sum().item() == 100


def test_a_large_copy_from_other_memory_waits_for_the_streams_earlier_work(sim: Simulator):
    sim.order("late")
    host, there = torch.ones(1 << 20), torch.zeros(1 << 20, device="sim")
    with sim.synchronizations() as found:
        there.copy_(host, non_blocking=True)
    host.fill_(3)
    assert [one.kind for one in found] == ["pageable"]
    assert there[0].item() == 1


def test_a_copy_to_other_memory_waits_though_it_is_non_blocking(sim: Simulator):
    sim.order("late")
    host, there = torch.zeros(100), torch.ones(100, device="sim")
    with sim.synchronizations() as found:
        host.copy_(there, non_blocking=True)
    assert host.sum() == 100
    assert [one.kind for one in found] == ["blocking copy"]


def test_unlocking_under_a_pending_copy_is_a_violation(sim: Simulator):
    sim.order("late")
    pages, there = Pages(4 * KIB), torch.zeros(4 * KIB, dtype=torch.uint8, device="sim")
    sim.lock(pages.address, 4 * KIB)
    pages.tensor.copy_(there, non_blocking=True)
    sim.unlock(pages.address)
    (found,) = sim.violations()
    assert "unlocked with a copy from the device pending" in found
    assert sim.violations() == []
    sim.lock(pages.address, 4 * KIB)
    pages.tensor.copy_(there, non_blocking=True)
    torch.accelerator.synchronize()
    sim.unlock(pages.address)
    assert sim.violations() == []


def test_pinned_tensors_live_until_their_copies_are_done(sim: Simulator):
    sim.order("late")
    held, there = sim.locked_bytes, torch.zeros(1 << 16, device="sim")
    host = torch.ones(1 << 16).pin_memory()
    there.copy_(host, non_blocking=True)
    del host
    assert sim.locked_bytes == held
    others = [torch.zeros(1 << 16).pin_memory() for _ in range(4)]
    assert there.sum().item() == 1 << 16
    del others


def test_megatrain_locks_by_the_registry(sim: Simulator):
    device = find("sim:1")
    assert isinstance(device, SimulatedDevice)
    assert (str(device), device.torch_device) == ("sim:1", torch.device("sim", 1))
    held = sim.locked_bytes
    arena = HostArena(100_000)
    arena.lock(device)
    assert arena.tensor.is_pinned()
    assert sim.locked_bytes > held
    arena.close()
    assert sim.locked_bytes == held
    sim.fail_lock(0)
    with pytest.raises(ExecuteError, match="can't be page-locked: error 2"):
        HostArena(100_000).lock(device)
