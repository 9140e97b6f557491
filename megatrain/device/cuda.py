"""Cuda: the features of CUDA beyond torch's generic interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

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

    def lacking(self) -> Sequence[str]:
        """Nothing: CUDA has all of the generic interface."""
        return ()

    def synchronize(self) -> None:
        """Sleeps, with an event of CUDA's own kind: a wait for a stream spins, and `torch.Event` ignores `blocking`."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.torch_device))
        event.synchronize()

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


def _unlock(address: int) -> None:
    _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()
