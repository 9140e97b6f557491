"""Device memory: CUDA's rules of reuse, a capacity, poison, and addresses that the host can't touch."""

from __future__ import annotations

import gc
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


def test_free_neighbours_become_one_block():
    held = [block(600 * KIB) for _ in range(3)]
    assert now("reserved_bytes") == 2 * MIB
    address = held[0].data_ptr()
    held.clear()
    assert block(MIB).data_ptr() == address
    assert now("reserved_bytes") == 2 * MIB


def test_a_stream_reuses_its_memory_at_once_and_another_stream_does_not(sim: Simulator):
    sim.order("late")
    x = block(1000)
    address = x.data_ptr()
    del x
    with on(torch.Stream(device="sim")):
        other = block(1000)
    assert other.data_ptr() != address
    assert block(1000).data_ptr() == address


def freed_while_read(sim: Simulator, *, recorded: bool) -> float:
    """A side stream reads a tensor that is freed, and its memory reused, before the stream gets there."""
    sim.order("late")
    side, out = torch.Stream(device="sim"), torch.zeros(256, device="sim")
    x = torch.ones(256, device="sim")
    side.wait_event(torch.accelerator.current_stream().record_event())
    with on(side):
        out.copy_(x)
    if recorded:
        x.record_stream(side)
    del x
    y = torch.full((256,), 7.0, device="sim")
    torch.accelerator.current_stream().synchronize()
    torch.accelerator.current_stream().wait_event(side.record_event())
    del y
    return out.sum().item()


def test_record_stream_keeps_memory_and_its_lack_is_seen(sim: Simulator):
    assert freed_while_read(sim, recorded=True) == 256
    assert freed_while_read(sim, recorded=False) != 256
    sim.drop("record_stream", 0)
    assert freed_while_read(sim, recorded=True) != 256


def test_recorded_memory_is_active_until_the_stream_has_passed_the_free(sim: Simulator):
    side = torch.Stream(device="sim")
    sim.order("late", side)
    x = block(1000)
    address = x.data_ptr()
    with on(side):
        torch.zeros(8, device="sim").add_(1)
    x.record_stream(side)
    with on(side):
        torch.zeros(8, device="sim").add_(1)  # after record_stream, before the free
    active = now("active_bytes")
    del x
    assert now("allocated_bytes") == active - 1024 == now("active_bytes") - 1024
    assert block(1000).data_ptr() != address
    side.synchronize()
    block(1)  # the allocator looks at its events when it is called
    assert now("active_bytes") == now("allocated_bytes")
    assert block(1000).data_ptr() == address


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


def test_without_segments_the_capacity_is_exact(sim: Simulator):
    sim.configure(capacity=4096, segments=False)
    held = [block(1000), block(2000), block(1024)]
    assert now("reserved_bytes") == now("allocated_bytes") == 4096
    with pytest.raises(torch.OutOfMemoryError):
        block(1)
    retries = stat("num_alloc_retries")
    held.pop()
    held.pop()
    held.append(block(3072))
    assert stat("num_alloc_retries") == retries  # the stream's own free bytes serve without waiting
    held.clear()
    with on(torch.Stream(device="sim")):
        held.append(block(4096))
    assert stat("num_alloc_retries") == retries + 1


def test_bytes_given_back_without_segments_are_not_lost_before_their_last_use(sim: Simulator):
    sim.configure(capacity=9216, segments=False)
    sim.order("late")
    x = torch.ones(1024, device="sim")
    out = torch.zeros(512, device="sim")
    torch.add(x[:512], 1, out=out)
    del x
    y = torch.full((1536,), 5.0, device="sim")
    assert out.sum().item() == 1024
    assert y.sum().item() == 5 * 1536


def test_peaks_are_kept_until_they_are_reset():
    x = block(4 * MIB)
    del x
    assert torch.accelerator.max_memory_allocated() == 4 * MIB
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == torch.accelerator.memory_allocated()


@pytest.mark.parametrize("poison", [True, False])
def test_new_and_freed_memory_is_poisoned_in_stream_order(sim: Simulator, poison: bool):
    sim.configure(poison=poison)
    sim.order("late")
    value = 255 if poison else 0
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


def test_a_tensor_resizes_with_its_values():
    x = torch.arange(4.0, device="sim")
    x.untyped_storage().resize_(64)
    assert x.tolist() == [0, 1, 2, 3]
    assert x.resize_(8)[:4].tolist() == [0, 1, 2, 3]


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


def test_each_device_has_memory_of_its_own(sim: Simulator):
    sim.set_capacity(1, 2 * MIB)
    before = now("allocated_bytes", 0)
    x = block(1000, "sim:1")
    assert (now("allocated_bytes", 0), now("allocated_bytes", 1)) == (before, 1024)
    with pytest.raises(torch.OutOfMemoryError, match="Device 1"):
        block(3 * MIB, "sim:1")
    assert block(3 * MIB, "sim:0").nbytes == 3 * MIB
    del x
