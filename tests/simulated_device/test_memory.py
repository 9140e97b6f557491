"""Memory of the simulated device: CUDA's rules of reuse, a capacity, poison, page locking, stray accesses."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from tests.simulated_device.simulator import Simulator

KIB, MIB = 1 << 10, 1 << 20


ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_cached_memory(sim: Simulator) -> Generator[None]:
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    yield
    gc.collect()
    torch.accelerator.empty_cache()


def block(nbytes: int, device: str = "sim:0") -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def on(stream: torch.Stream):
    return torch.get_device_module("sim").stream(stream)


def stat(name: str, device: int = 0) -> int:
    return torch.accelerator.memory_stats(device)[name]


def now(name: str, device: int = 0) -> int:
    return stat(f"{name}.all.current", device)


def test_sizes_are_rounded_and_segments_are_those_of_cuda():
    for nbytes, rounded, segment in [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # what is left of a segment, 1 MiB or less, isn't split off
    ]:
        before = now("allocated_bytes"), now("reserved_bytes")
        x = block(nbytes)
        assert now("allocated_bytes") - before[0] == rounded, nbytes
        assert now("reserved_bytes") - before[1] == segment, nbytes
        assert now("requested_bytes") >= nbytes
        del x
        torch.accelerator.empty_cache()


def test_the_capacity_counts_segments_and_ends_in_out_of_memory(sim: Simulator):
    sim.configure(capacity=20 * MIB)
    x = block(2 * MIB)
    retries, ooms = stat("num_alloc_retries"), stat("num_ooms")
    with pytest.raises(
        torch.OutOfMemoryError, match=r"Tried to allocate 19\.00 MiB\. Device 0 has a total capacity of 20"
    ):
        block(19 * MIB)
    assert (stat("num_alloc_retries") - retries, stat("num_ooms") - ooms) == (1, 1)
    del x
    assert torch.accelerator.get_memory_info(0) == (0, 20 * MIB)
    with on(torch.Stream(device="sim")):
        y = block(20 * MIB)  # the cached segment of x is given back for it
    assert stat("num_alloc_retries") - retries == 2
    assert now("reserved_bytes") == y.nbytes


def test_new_and_freed_memory_is_poisoned_in_stream_order(sim: Simulator):
    sim.order("late")
    value = 255
    x = block(1000)
    assert x.cpu().unique().tolist() == [value]
    x.zero_()
    total = x.sum()
    address = x.data_ptr()
    del x
    y = block(1000)
    assert y.data_ptr() == address
    assert total.item() == 0  # what came before the free in the stream still saw the values
    assert y.cpu().unique().tolist() == [value]


STRAY = """
import ctypes, sys, torch
from tests.simulated_device import load
load()
x = torch.zeros(1000, dtype=torch.uint8, device="sim:{device}")
address = x.data_ptr()
if {freed}:
    del x
print(ctypes.c_char.from_address(address + 10).value)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("device", "freed", "words"),
    [(0, False, "sim:0, block of 1000 bytes allocated on stream 0"), (1, True, "sim:1, block of 2097152 bytes free")],
)
def test_a_stray_access_of_the_host_ends_the_process_with_the_address(device: int, freed: bool, words: str):
    code = STRAY.format(device=device, freed=freed)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -11, done.stderr
    assert "host touched device memory at 0x" in done.stderr
    assert words in done.stderr


class Pages:
    """Host memory of whole pages, as `uint8`."""

    def __init__(self, nbytes: int) -> None:
        self.tensor = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        self.address = self.tensor.data_ptr()


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
