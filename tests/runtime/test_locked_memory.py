"""Host memory by pages and its way to the device: locked in pieces, or not at all; the numbers are the same."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain
from megatrain.device import Accelerator, Cuda, cuda
from megatrain.device import bus as buses
from megatrain.device.bus import BUFFERS, Bus
from megatrain.device.host_arena import HostArena
from megatrain.errors import ExecuteError
from megatrain.runtime.stores.host_store import HostStore
from tests.models import MODELS
from tests.runtime.parity import assert_same, train
from tests.runtime.strict_toy import PAGE, StrictToy

ROOT = Path(__file__).parent.parent.parent


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

CHILDREN = """
import gc, os, sys, torch
from torch.utils.data import DataLoader, Dataset
from megatrain.device import Device
from megatrain.device.host_arena import HostArena

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
arena = HostArena(1 << 22)
arena.tensor.fill_(3)
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

for use in (drop, lambda: print("locked", view.sum(), flush=True), lambda: None):
    child = os.fork()
    if child == 0:
        use()
        sys.exit(0)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
arena.tensor.fill_(5)
print("parent", int(view.sum()), flush=True)
HostArena(64).lock(device)
"""


@pytest.mark.nightly
@linux
def test_a_forked_child_lacks_what_is_locked_and_nothing_else():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILDREN], capture_output=True, text=True, timeout=400, cwd=ROOT
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]",
        *("dropped 2097152.0", "child 0"),
        *("child -11",),
        *("child 0",),
        "parent 320",
        "unlocked",
    ]


LEAST = 2 * BUFFERS * PAGE


@pytest.fixture
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buses, "MOST_BYTES", 4 * LEAST)
    monkeypatch.setattr(buses, "LEAST_BYTES", LEAST)


def through_a_ring() -> StrictToy:
    return StrictToy(limit=2 * LEAST, num_refusals=1)


def in_pieces_through_a_ring() -> StrictToy:
    return StrictToy(lock_bytes=PAGE, limit=2 * LEAST, num_refusals=1)


@pytest.mark.usefixtures("small_rings")
def test_what_is_refused_is_said_once_and_printed():
    model, args, kwargs = MODELS["gpt_loss"]()
    toy = through_a_ring()
    compiled = megatrain.compile(model, device=toy, activations="offload")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            compiled(*args, **kwargs)[1].backward()
    (warning,) = [str(w.message) for w in caught if issubclass(w.category, megatrain.PageLockWarning)]
    assert "\n" not in warning
    ring = "transfers pass through a ring of 64.00 KiB, copied once more"
    assert warning.startswith("the system refused to page-lock ")
    assert warning.endswith(f"{ring}. Raise it.")
    assert ring in str(compiled)
    assert sum(toy.locked.values()) <= toy.limit
    assert not megatrain.compile(MODELS["gpt_loss"]()[0], device=StrictToy()).megatrain.engine.bus.note


@pytest.mark.usefixtures("small_rings")
def test_the_largest_ring_that_can_be_locked_is_taken():
    for limit, expected in ((100 * LEAST, 4), (3 * LEAST, 2), (2 * LEAST - 1, 1), (LEAST - 1, 0)):
        toy = StrictToy(limit=limit)
        bus = Bus(toy)
        with pytest.warns(megatrain.PageLockWarning, match="even a ring" if not expected else "pass through a ring"):
            arena = bus.arena(limit + 1)
        assert arena.is_refused
        assert not arena.is_locked
        assert sum(toy.locked.values()) == expected * LEAST


@pytest.mark.filterwarnings("ignore::megatrain.PageLockWarning")
@pytest.mark.usefixtures("small_rings")
def test_any_layout_crosses():
    toy = in_pieces_through_a_ring()
    bus = Bus(toy)
    arena = bus.arena(1 << 20)
    plain = torch.randn(300, 70)
    values = [plain, plain.t(), plain[:, :1].expand(300, 70), torch.ones(()), torch.empty(0, 3), plain > 0]
    for value in (*values, torch.randn(9000, dtype=torch.complex64).conj()):
        place = arena.tensor[64 : 64 + value.numel() * value.element_size()].view(value.dtype).view(value.shape)
        bus.to_host(place, value, arena)
        toy.synchronize()
        assert torch.equal(place, value)
        back = torch.empty_like(place)
        bus.to_device(back, place, arena)
        toy.synchronize()
        assert torch.equal(back, value)


@pytest.mark.filterwarnings("ignore::megatrain.PageLockWarning")
@pytest.mark.usefixtures("small_rings")
def test_what_passed_through_a_ring_may_be_overwritten_at_once():
    toy = through_a_ring()
    bus = Bus(toy)
    arena = bus.arena(1 << 20)
    toy.enter(toy.new_stream())  # works only when somebody waits for it
    first = torch.randint(256, (1 << 20,), dtype=torch.uint8)
    arena.tensor.copy_(first)
    device = torch.zeros(1 << 20, dtype=torch.uint8)
    bus.to_device(device, arena.tensor, arena)
    arena.tensor.fill_(2)
    assert not device[-PAGE:].any(), "the last piece is still on its way"
    bus.to_host(arena.tensor, device, arena)
    assert torch.equal(arena.tensor, first)


@pytest.mark.filterwarnings("ignore::megatrain.PageLockWarning")
@pytest.mark.usefixtures("small_rings")
@pytest.mark.parametrize("fails", ["once", "at last", "is interrupted"])
def test_arenas_are_locked_while_others_are_filled(fails: str, monkeypatch: pytest.MonkeyPatch):
    """The lock of the first waits until all the rest is filled; and the memory is that of a lock at the end."""
    model, args, kwargs = MODELS["gpt_loss"]()
    toy, eager, num_filled = StrictToy(lock_bytes=3 * PAGE), copy.deepcopy(model), 0
    lock, move, threads, is_filled = toy.lock, HostStore._move_one, list[str](), threading.Event()
    num_moved, was_filled = len(list(model.parameters())), list[bool]()

    def moving(self: HostStore, *given: Any) -> None:
        nonlocal num_filled
        move(self, *given)
        num_filled += 1
        if num_filled == 4 and fails == "is interrupted":
            is_filled.set()
            raise KeyboardInterrupt
        if num_filled == num_moved:
            is_filled.set()

    def locking(address: int, nbytes: int) -> Any:
        threads.append(threading.current_thread().name)
        if threads[-1].startswith("megatrain-lock"):
            was_filled.append(is_filled.wait(10))
            if fails == "once" and len(threads) == 2:
                raise ExecuteError("refused.\n  There is a limit.\n  Raise it.")
        elif fails == "at last":
            raise ExecuteError("refused.\n  There is a limit.\n  Raise it.")
        return lock(address, nbytes)

    monkeypatch.setattr(HostStore, "_move_one", moving)
    monkeypatch.setattr(toy, "lock", locking)
    toy.allows_pageable = is_refused = fails == "at last"
    compiled = megatrain.compile(model, device=toy, activations="recompute")
    if fails == "is interrupted":
        with pytest.raises(KeyboardInterrupt):
            compiled(*args, **kwargs)
        assert sum(name.startswith("megatrain-lock") for name in threads) <= 1, "no other has begun"
    assert_same(train(eager, eager, args, kwargs), train(compiled, model, args, kwargs))
    assert any(name.startswith("megatrain-lock") for name in threads)
    assert all(was_filled), "memory was filled only after it was locked"
    assert ("refused" in compiled.megatrain.engine.bus.note) == is_refused
    assert bool(toy.locked) == (not is_refused)
    assert not any(thread.name.startswith("megatrain-lock") for thread in threading.enumerate())


class FakeCudart:
    """CUDA's runtime as one thread sees it: memory is registered by pages, and an error stays until it is asked for."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.log: list[Any] = []
        self.codes: Iterator[int] = iter(())
        self.last_error = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert address % PAGE == 0
        code = next(self.codes, 0)
        self.log.append(("register", nbytes, flags))
        if code == 0:
            end = address + nbytes
            assert all(end <= a or a + n <= address for a, n in self.locked.items())
            self.locked[address] = nbytes
        self.last_error = code or self.last_error
        return code

    def cudaHostUnregister(self, address: int) -> int:
        # Still mapped: reading it would crash otherwise.
        self.log.append(("unregister", self.locked.pop(address)))
        return 0

    def cudaGetLastError(self) -> int:
        code, self.last_error = self.last_error, 0
        return code


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    fake = FakeCudart()
    monkeypatch.setattr(cuda, "_cudart", lambda: fake)
    monkeypatch.setattr(cuda, "_last_error", lambda: fake.cudaGetLastError)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(Accelerator, "settle", lambda self: fake.log.append("settled"))
    return fake


def locked(nbytes: int) -> HostArena:
    arena = HostArena(nbytes)
    arena.lock(Cuda(0))
    return arena


def test_large_memory_is_locked_in_pieces(cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch):
    assert Cuda.lock_bytes == 64 << 30
    monkeypatch.setattr(Cuda, "lock_bytes", 2 * PAGE)
    arena = locked(5 * PAGE + 7)
    assert arena.is_locked
    assert [n for _, n, _ in cudart.log] == [2 * PAGE, 2 * PAGE, PAGE + 7]
    assert arena.cuts(arena.tensor) == [2 * PAGE, 4 * PAGE]
    assert arena.cuts(arena.tensor[: 2 * PAGE]) == arena.cuts(arena.tensor[2 * PAGE : 4 * PAGE]) == []
    assert arena.cuts(arena.tensor[2 * PAGE - 64 : 2 * PAGE + 64]) == [64]
    del arena
    assert not cudart.locked


def test_an_arena_beyond_reason_is_refused_with_its_size():
    with pytest.raises(ExecuteError, match=r"the host can't allocate .* PiB of memory"):
        HostArena(1 << 60)
