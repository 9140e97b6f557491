"""Recorder: work of a device that is recorded once and issued again by one call, such as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Recorder(Protocol):
    """Records work, and keeps the memory in which it runs.

    Tensors that recorded work makes are in memory that no other work gets, for as long as the recorder is there, also
    without recordings. All recordings share this memory, so one run overwrites what the run before has left.
    """

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        """Records what `work` launches, which nothing runs yet.

        Args:
            work: Launches kernels and copies between tensors of the device, and waits for nothing. It runs on a stream
                of its own, without a wait for other streams.

        Returns:
            Issues the recorded work to the calling thread's current stream. All that it reads must be at the addresses
            of the recording.

        Raises:
            RuntimeError: If the device can't record it.
        """
        ...

    def memory(self, address: int, nbytes: int) -> torch.Tensor:
        """Returns bytes that recorded work writes, as `uint8`, though the tensor there is gone."""
        ...
