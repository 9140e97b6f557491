"""CudaGraphs: CUDA graphs, which share one private pool of torch's allocator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import torch

from megatrain.device.kernel_settings import kernel_settings


class CudaGraphs:
    """A `LaunchGraphs` of a GPU.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # The default stream can't be captured.
        self._stream = torch.cuda.Stream(device)
        # With its last graph a pool is gone, and another capture into it fails: this one stays.
        self._first = self.record(lambda: torch.zeros(1, device=device))

    def settings(self) -> Hashable:
        """Torch's global settings."""
        return kernel_settings()

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        """Captures a graph; other threads may go on with what they do, synchronisations included."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture is broken, and `work` has said why
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Takes it while a graph is recorded, which is then dropped."""
        made: list[torch.Tensor] = []
        self.record(lambda: made.append(torch.zeros(nbytes, dtype=torch.uint8, device=self._device)))
        return made[0]

    def memory(self, address: int, nbytes: int) -> torch.Tensor:
        """Reads the address by the protocol that libraries for CUDA share."""
        return torch.as_tensor(_Bytes(address, nbytes), device=self._device)


class _Bytes:
    """Memory of a GPU, by the CUDA array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
