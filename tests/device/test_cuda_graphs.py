"""Captures of CUDA graphs that fail leave torch's allocator as it was; against a stand-in for CUDA's part of torch."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.device import cuda_graphs
from megatrain.device.cuda_graphs import CudaGraphs


class Capture:
    """Stands for a CUDA graph: notes what is called, and is given up by CUDA once `wait` was."""

    notes: list[str]
    is_given_up = False

    def capture_begin(self, **options: Any) -> None:
        assert options["capture_error_mode"] == "thread_local"
        type(self).is_given_up = False
        self.notes.append("begin")

    def capture_end(self) -> None:
        self.notes.append("end")
        if self.is_given_up:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.notes.append("replay")

    @classmethod
    def wait(cls) -> None:
        """What a read of a number does during a capture."""
        cls.is_given_up = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    Capture.notes = found = []
    zeros = torch.zeros
    monkeypatch.setattr(cuda_graphs, "_broken", [])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=torch.device(device)))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Capture)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device, **options: zeros(*sizes, **options))
    monkeypatch.setattr(
        "megatrain.device.cuda_graphs.end_capture_of_memory",
        lambda index, pool: found.append(f"end of memory {index} {pool}"),
    )
    return found


def test_a_capture_that_cuda_gives_up_ends_for_the_allocator_too(notes: list[str]):
    graphs = CudaGraphs(torch.device("cuda", 1))
    del notes[:]
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.record(Capture.wait)
    assert notes == ["begin", "end", "end of memory 1 (0, 7)"]
    assert len(cuda_graphs._broken) == 1
    graphs.record(lambda: None)()
    assert notes[3:] == ["begin", "end", "replay"]


def given_up_unseen() -> None:
    Capture.is_given_up = True


def test_a_capture_that_fails_at_its_end_ends_for_the_allocator_too(notes: list[str]):
    graphs = CudaGraphs(torch.device("cuda", 0))
    del notes[:]
    with pytest.raises(RuntimeError, match="previous error"):
        graphs.record(given_up_unseen)
    assert notes == ["begin", "end", "end of memory 0 (0, 7)"]


def test_an_interrupt_ends_a_capture_as_usual(notes: list[str]):
    graphs = CudaGraphs(torch.device("cuda", 0))
    del notes[:]

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        graphs.record(interrupted)
    assert notes == ["begin", "end"]
    assert cuda_graphs._broken == []


def test_memory_of_the_graphs_comes_from_a_recording(notes: list[str]):
    graphs = CudaGraphs(torch.device("cuda", 0))
    del notes[:]
    assert graphs.allocate(12).nbytes == 12
    assert notes == ["begin", "end"]
