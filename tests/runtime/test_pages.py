"""Host memory by pages: zero, exact in size, page-locked where there is CUDA, gone with its last view."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch

from megatrain.device import Accelerator, Cpu, Cuda, cuda
from megatrain.errors import ExecuteError
from megatrain.runtime.stores.host_store import HostArena


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 5000, 3_000_001])
def test_an_arena_has_its_exact_size_and_is_zero(nbytes: int):
    arena = HostArena(nbytes)
    assert arena.nbytes == arena.tensor.untyped_storage().nbytes() == nbytes
    assert arena.tensor.dtype == torch.uint8
    assert not arena.tensor.any()
    assert not arena.is_pinned


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


def test_only_cuda_is_page_locked():
    assert not HostArena(64, pin=Cpu()).is_pinned
    assert not HostArena(64, pin=Accelerator("mps", 0)).is_pinned


class FakeCudart:
    def __init__(self, code: int = 0) -> None:
        self.code, self.locked, self.log = code, {}, []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.log.append(("register", nbytes, flags))
        if self.code == 0:
            self.locked[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        # Still mapped: reading it would crash otherwise.
        self.log.append(("unregister", self.locked.pop(address)))
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    fake = FakeCudart()
    monkeypatch.setattr(cuda, "_cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return fake


def test_a_pinned_arena_is_unlocked_with_its_last_view(cudart: FakeCudart):
    arena = HostArena(5000, pin=Cuda(0))
    assert arena.is_pinned
    arena.pin(Cuda(0))
    assert cudart.log == [("register", 5000, 0)]
    view = arena.tensor[:8]
    arena.close()
    del arena
    assert cudart.locked
    del view
    assert not cudart.locked
    assert cudart.log[-1] == ("unregister", 5000)


def test_an_arena_that_cant_be_locked_is_refused(cudart: FakeCudart):
    cudart.code = 2
    with pytest.raises(ExecuteError, match=r"can't be page-locked: CUDA error 2(.|\n)*ulimit"):
        HostArena(5000, pin=Cuda(0))
    gc.collect()
    assert cudart.log == [("register", 5000, 0)], "what was never locked must not be unlocked"
