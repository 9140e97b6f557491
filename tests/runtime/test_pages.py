"""Host memory by pages: zero, exact in size, gone with its last view, not in children if locked."""

from __future__ import annotations

import ctypes
import gc
import mmap
import platform
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from megatrain.device.host_pages import populate
from megatrain.errors import ExecuteError
from megatrain.memory.host_arena import HostArena

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 5000, 3_000_001])
def test_an_arena_has_its_exact_size_and_is_zero(nbytes: int):
    arena = HostArena(nbytes)
    assert arena.nbytes == arena.tensor.untyped_storage().nbytes() == nbytes
    assert arena.tensor.dtype == torch.uint8
    assert not arena.tensor.any()
    assert not arena.is_locked


def test_views_outlive_the_arena():
    arena = HostArena(1 << 16)
    view = arena.tensor[64:128].view(torch.float32).fill_(3)
    arena.close()
    assert arena.nbytes == 0
    arena.close()
    del arena
    gc.collect()
    assert view.tolist() == [3.0] * 16


def test_the_memory_goes_with_the_last_view():
    arena = HostArena(1 << 26)
    arena.tensor.fill_(1)
    kept = weakref.ref(arena._pages)
    view = arena.tensor[:64]
    arena.close()
    assert kept() is not None
    del view
    assert kept() is None


def test_an_arena_beyond_reason_is_refused_with_its_size():
    with pytest.raises(ExecuteError, match=r"the host can't allocate .* PiB of memory"):
        HostArena(1 << 60)


def smaps(address: int) -> dict[str, str]:
    """What Linux says of the mapping at an address."""
    found: dict[str, str] = {}
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            start, end = (int(number, 16) for number in name.split("-"))
            is_inside = start <= address < end
            if is_inside:
                found["Rights"] = rest.split()[0]
        elif is_inside:
            found[name[:-1]] = rest.strip()
    return found


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_pages_are_private_and_may_be_huge():
    arena = HostArena(64 << 20)
    found = smaps(arena.tensor.data_ptr())
    assert found["Rights"] == "rw-p"
    assert "hg" in found["VmFlags"].split() or not Path("/sys/kernel/mm/transparent_hugepage").exists()


@linux
@pytest.mark.skipif(tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (5, 14), reason="an older kernel")
def test_populated_pages_are_resident_and_keep_their_contents():
    nbytes, num_threads = (9 << 20) + 5, torch.get_num_threads()
    arena = HostArena(nbytes)
    arena.tensor[5_000_000] = 7
    torch.set_num_threads(3)
    try:
        populate(arena.tensor.data_ptr(), nbytes)
    finally:
        torch.set_num_threads(num_threads)
    resident = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(arena.tensor.data_ptr()), ctypes.c_size_t(nbytes), resident) == 0
    assert all(flags & 1 for flags in resident)
    assert (int(arena.tensor.count_nonzero()), int(arena.tensor[5_000_000])) == (1, 7)


# -- forked children -------------------------------------------------------------------------------------------

CHILDREN = """
import gc, os, sys, torch
from torch.utils.data import DataLoader, Dataset
from megatrain.device import Device
from megatrain.memory.host_arena import HostArena

torch.set_num_threads(1)  # a forked child has no other threads

class Locking(Device):
    def lock(self, address, nbytes):
        def unlock(process=os.getpid()):
            if os.getpid() != process:
                raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
            print("unlocked", flush=True)
        return unlock

class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.full((1 << 16,), float(index))  # the worker maps and unmaps memory

device = Locking(torch.device("cpu"))
arena, plain = HostArena(1 << 22), HostArena(1 << 20)
arena.tensor.fill_(3)
plain.tensor.fill_(4)
arena.lock(device)
view = arena.part(0, 64)
batches = [batch[:, 0].tolist() for batch in DataLoader(Numbers(), 2, num_workers=2, multiprocessing_context="fork")]
print(batches, flush=True)

def drop():
    global arena, view
    more = [torch.ones(1 << 18) for _ in range(8)]
    del arena, view
    gc.collect()
    print("dropped", float(sum(x.sum() for x in more)), flush=True)

def map_there():
    import mmap
    address = arena.tensor.data_ptr()
    others = [mmap.mmap(-1, 1 << 22) for _ in range(20)]
    starts = [torch.frombuffer(other, dtype=torch.uint8).data_ptr() for other in others]
    print("apart", all(start + (1 << 22) <= address or address + (1 << 22) <= start for start in starts), flush=True)

def grandchild():
    print("read", int(plain.tensor.sum()) >> 20, flush=True)
    child = os.fork()
    if child == 0:
        drop()
        os._exit(0)
    os.waitpid(child, 0)

for use in (drop, map_there, grandchild, lambda: print("locked", view.sum(), flush=True), lambda: None):
    child = os.fork()
    if child == 0:
        use()
        sys.exit(0)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
arena.tensor.fill_(5)
print("parent", int(view.sum()), flush=True)
HostArena(64).lock(device)
"""


@pytest.mark.wide
@linux
def test_a_forked_child_lacks_what_is_locked_and_nothing_else():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILDREN], capture_output=True, text=True, timeout=400, cwd=ROOT
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]",
        *("dropped 2097152.0", "child 0"),
        *("apart True", "child 0"),
        *("read 4", "dropped 2097152.0", "child 0"),
        *("child -11",),
        *("child 0",),
        "parent 320",
        "unlocked",
    ]


ENDS = """
from megatrain.device.host_pages import HostPages

def unlock():
    raise RuntimeError("CUDA error: driver shutting down")

pages = HostPages.of(64)
pages.keep_from_children()
pages.unlock = unlock
"""


def test_the_end_of_a_process_unlocks_nothing():
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=400, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
