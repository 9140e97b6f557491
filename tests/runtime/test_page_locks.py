"""Page-locking by CUDA's own functions, or a stand-in for them: in pieces, all or nothing, without an error left."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megatrain.device import Accelerator, Cpu, Cuda, cuda
from megatrain.errors import ExecuteError
from megatrain.memory.bus import Bus
from megatrain.memory.host_arena import HostArena
from tests.runtime.strict_toy import PAGE


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


def test_only_cuda_locks():
    for device in (Cpu(), Accelerator("mps", 0)):
        arena = HostArena(64)
        arena.lock(device)
        assert not arena.is_locked


def test_memory_is_unlocked_with_its_last_view_when_no_copy_is_under_way(cudart: FakeCudart):
    arena = locked(5000)
    assert arena.is_locked
    arena.lock(Cuda(0))
    assert cudart.log == [("register", 5000, 0)]
    view = arena.part(0, 8)
    arena.close()
    del arena
    assert cudart.locked
    del view
    assert not cudart.locked
    assert cudart.log[1:] == ["settled", ("unregister", 5000)]


def test_pages_are_made_resident_before_they_are_locked(cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda, "populate", lambda address, nbytes: cudart.log.append(("populated", nbytes)))
    arena = locked(5000)
    assert cudart.log == [("populated", 5000), ("register", arena.nbytes, 0)]


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


@pytest.mark.parametrize("num_locked", [0, 1, 2])
def test_what_was_locked_before_a_refusal_is_unlocked_and_no_error_stays(
    num_locked: int, cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Cuda, "lock_bytes", 2 * PAGE)
    cudart.codes = iter([0] * num_locked + [2])
    arena = HostArena(5 * PAGE)
    size = r"8\.00 KiB" if num_locked < 2 else r"4\.00 KiB"
    with pytest.raises(ExecuteError, match=rf"can't page-lock {size}.*CUDA error 2(.|\n)*\.wslconfig"):
        arena.lock(Cuda(0))
    assert not cudart.locked
    assert not arena.is_locked
    assert arena.cuts(arena.tensor) == []
    assert cudart.last_error == 0
    arena.lock(Cuda(0))
    assert arena.is_locked
    del arena
    gc.collect()
    assert not cudart.locked, "and what was never locked is not unlocked"


def test_a_refusal_leads_to_a_ring(cudart: FakeCudart):
    cudart.codes = iter([2, 2])
    with pytest.warns(UserWarning, match=r"page-lock 1.00 MiB.*ring of 128.00 MiB.*\.wslconfig"):
        arena = Bus(Cuda(0)).arena(1 << 20)
    assert arena.is_refused
    assert cudart.last_error == 0


def test_the_loaded_librarys_function_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda, "_LAST_ERROR", {"libnothing": "getppid", "libc.so": "getpid"})
    function = cuda._last_error()
    assert function is not None
    assert function() == os.getpid()
    monkeypatch.setattr(cuda, "_LAST_ERROR", {"libnothing": "getppid"})
    assert cuda._last_error() is None


def test_without_that_function_a_launch_takes_the_error(cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch):
    def launch(*args: Any, **kwargs: Any) -> None:
        if cudart.cudaGetLastError():
            raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(cuda, "_last_error", lambda: None)
    monkeypatch.setattr(torch, "zeros", launch)
    cudart.codes = iter([2])
    with pytest.raises(ExecuteError):
        locked(64)
    assert cudart.last_error == 0
