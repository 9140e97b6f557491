"""Cuda: the features of CUDA beyond torch's generic interface."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megatrain.device import reserve
from megatrain.device.accelerator import Accelerator
from megatrain.errors import ExecuteError
from megatrain.sizes import format_bytes


class Cuda(Accelerator):
    """A GPU of NVIDIA, or of AMD under the same name.

    Args:
        index: Its number; None takes the current one.
    """

    name = "cuda"

    def __init__(self, index: int | None = None) -> None:
        super().__init__(self.name, index)

    def uncounted(self) -> tuple[tuple[str, int], ...]:
        """Adds the workspaces of cuBLAS, one for each thread that computes: the caller's and autograd's."""
        capability = torch.cuda.get_device_capability(self.torch_device)
        config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")  # noqa: TID251  # torch reads it, so it says what torch takes
        nbytes = reserve.cublas_workspace(capability, config)
        return (("cuBLAS workspaces", 2 * nbytes), *super().uncounted())

    def ran_out(self, error: BaseException) -> bool:
        """Knows the errors of libraries that couldn't get memory of their own, too."""
        is_librarys = isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)
        return is_librarys or super().ran_out(error)

    def lock(self, address: int, nbytes: int) -> Callable[[], None]:
        """Registers the memory with the driver: copies from and to pageable memory would block the host."""
        with torch.cuda.device(self.torch_device):
            code = int(_cudart().cudaHostRegister(address, nbytes, 0))
        if code != 0:
            raise ExecuteError(
                f"{format_bytes(nbytes)} of host memory can't be page-locked: CUDA error {code}.\n"
                "  Transfers that overlap with compute need page-locked memory.\n"
                "  Raise the limit on locked memory (ulimit -l), or free host memory."
            )
        return partial(_unlock, address)


_NO_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def _unlock(address: int) -> None:
    _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()
