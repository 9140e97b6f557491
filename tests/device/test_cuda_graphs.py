"""Captures of CUDA graphs that fail leave torch's allocator as it was; against a stand-in for CUDA's part of torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch

from megatrain.device import Cuda
from megatrain.device import cuda as cuda_graphs
from megatrain.device.cuda import CudaGraphs
from megatrain.device.interface import kernel_settings
from megatrain.errors import ExecuteError


class Capture:
    """Stands for a CUDA graph of torch 2.11: notes what is called, and is given up by CUDA once `wait` was.

    As long as no capture has ended well since, the default generator takes itself for captured.
    """

    notes: list[str]
    is_given_up = is_generator_captured = False

    def capture_begin(self, **options: Any) -> None:
        assert options["capture_error_mode"] == "thread_local"
        Capture.is_given_up, Capture.is_generator_captured = False, True
        self.notes.append("begin")

    def capture_end(self) -> None:
        self.notes.append("end")
        if self.is_given_up:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        Capture.is_generator_captured = False

    def replay(self) -> None:
        if self.is_generator_captured:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self.notes.append("replay")

    @classmethod
    def wait(cls) -> None:
        """What a read of a number does during a capture."""
        cls.is_given_up = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


class Stream(NamedTuple):
    """Stands for a stream of CUDA: torch hands out 32 of them in turn."""

    device: torch.device
    cuda_stream: int


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    Capture.notes = found = []
    zeros = torch.zeros
    streams = itertools.count()
    monkeypatch.setattr(cuda_graphs, "_broken", [])
    monkeypatch.setattr(cuda_graphs, "_captured_on", set())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(torch.device(device), next(streams) % 32))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Capture)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device, **options: zeros(*sizes, **options))
    monkeypatch.setattr(
        "megatrain.device.cuda.end_capture_of_memory",
        lambda index, pool: found.append(f"end of memory {index} {pool}"),
    )
    return found


def test_a_capture_that_cuda_gives_up_ends_for_the_allocator_too(notes: list[str]):
    graphs = CudaGraphs(torch.device("cuda", 1))
    del notes[:]
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.record(Capture.wait)
    assert notes == ["begin", "end", "end of memory 1 (0, 7)", "begin", "end"]
    assert len(cuda_graphs._broken) == 1
    graphs.record(lambda: None)()
    assert notes[5:] == ["begin", "end", "replay"]


def test_recordings_of_before_run_after_a_capture_that_cuda_gives_up(notes: list[str]):
    graphs = CudaGraphs(torch.device("cuda", 0))
    launch = graphs.record(lambda: None)
    for work, message in ((Capture.wait, "not permitted"), (given_up_unseen, "previous error")):
        with pytest.raises(RuntimeError, match=message):
            graphs.record(work)
        launch()
    assert notes[-1] == "replay"
    assert not Capture.is_generator_captured


def test_no_two_models_capture_on_one_stream(notes: list[str]):
    made = [CudaGraphs(torch.device("cuda", 0)) for _ in range(20)]
    del made[3]
    made += [CudaGraphs(torch.device("cuda", 0)) for _ in range(13)]
    assert {graphs._stream.cuda_stream for graphs in made} == set(range(32))
    other = CudaGraphs(torch.device("cuda", 1))
    with pytest.raises(ExecuteError, match=r'(?s)no stream of cuda:0 is left.*kernels="eager"'):
        CudaGraphs(torch.device("cuda", 0))
    free = made.pop(7)._stream.cuda_stream
    assert CudaGraphs(torch.device("cuda", 0))._stream.cuda_stream == free
    assert other._stream.device.index == 1
    assert notes


@pytest.mark.parametrize("backend", ["native", "cudaMallocAsync", "pluggable"])
def test_only_torchs_own_allocator_gives_recordings_memory(backend: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    assert Cuda(0).has_launch_graphs == (backend == "native")


def given_up_unseen() -> None:
    Capture.is_given_up = True


def test_memory_of_the_graphs_comes_from_a_recording(notes: list[str]):
    graphs = CudaGraphs(torch.device("cuda", 0))
    del notes[:]
    assert graphs.allocate(12).nbytes == 12
    assert notes == ["begin", "end"]


SETTINGS: dict[str, tuple[Any, str, Sequence[Any]]] = {
    "fp16 accumulation": (torch.backends.cuda.matmul, "allow_fp16_accumulation", (False, True)),
    "reduced precision": (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", (False, True)),
    "TF32 of products": (torch.backends.cuda.matmul, "fp32_precision", ("ieee", "tf32")),
    "TF32 of convolutions": (torch.backends.cudnn.conv, "fp32_precision", ("ieee", "tf32")),  # pyright: ignore
    "TF32 of RNNs": (torch.backends.cudnn.rnn, "fp32_precision", ("ieee", "tf32")),  # pyright: ignore
    "cuDNN's trials": (torch.backends.cudnn, "benchmark", (False, True)),
    "deterministic": (torch.backends.cudnn, "deterministic", (False, True)),
    "sums": (torch.backends.opt_einsum.m, "enabled", (False, True)),  # pyright: ignore
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_that_chooses_kernels_makes_other_recordings(name: str):
    place, attribute, values = SETTINGS[name]
    before, now = kernel_settings(), getattr(place, attribute)
    try:
        setattr(place, attribute, next(value for value in values if value != now))
        assert kernel_settings() != before
    finally:
        setattr(place, attribute, now)
    assert kernel_settings() == before
