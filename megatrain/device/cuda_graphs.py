"""CudaGraphs: CUDA graphs, which share one private pool of torch's allocator."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from megatrain.device.launch_graphs import LaunchGraphs
from megatrain.errors import ExecuteError
from megatrain.torch_allocator import end_capture_of_memory

# Of captures that CUDA has given up: torch's allocators refer to them from then on.
_broken: list[torch.cuda.CUDAGraph] = []
# Streams on which graphs of this process are captured, by device and handle.
_captured_on: set[tuple[int | None, int]] = set()
_lock = threading.Lock()
_POOL = 32
"""Streams that torch has of a device and priority, and hands out in turn."""


class CudaGraphs(LaunchGraphs):
    """CUDA graphs, captured on a stream of their own.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _own_stream(device)
        weakref.finalize(self, _captured_on.discard, (device.index, self._stream.cuda_stream))
        # With its last graph a pool is gone, and another capture into it fails: this one stays.
        self._first = self.record(lambda: torch.zeros(1, device=device))

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        """Captures a graph; other threads may go on with what they do, synchronisations included."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # `work` has said why
                    self._end(graph)
                raise
            self._end(graph)
        return graph.replay

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except BaseException:
            _broken.append(graph)
            with contextlib.suppress(RuntimeError):  # it may have come so far by itself
                end_capture_of_memory(self._stream.device.index, self._pool)
            # In torch 2.11 the default generator, too, takes the capture for going on, until another one ends well:
            # each launch and each draw would fail.
            with contextlib.suppress(RuntimeError):
                again = torch.cuda.CUDAGraph()
                again.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                torch.zeros(1, device=self._device)
                again.capture_end()
            raise

    def memory(self, address: int, nbytes: int) -> torch.Tensor:
        """Reads the address by the protocol that libraries for CUDA share."""
        return torch.as_tensor(_Bytes(address, nbytes), device=self._device)


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream on which nobody else captures: with a graph, torch drops cuBLAS's workspaces of the graph's stream.

    The default stream can't be captured.

    Raises:
        ExecuteError: If there is none left.
    """
    with _lock:
        for _ in range(_POOL):
            stream = torch.cuda.Stream(device)
            key = device.index, stream.cuda_stream
            if key not in _captured_on:
                _captured_on.add(key)
                return stream
    raise ExecuteError(
        f"no stream of {device} is left on which kernels could be recorded.\n"
        f"  torch has {_POOL} streams of a device, and each model with recorded kernels has one of its own.\n"
        '  Let go of models that are done, or compile with kernels="eager".'
    )


class _Bytes:
    """Memory of a GPU, by the CUDA array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
