"""LaunchGraphs: work of a device that is recorded once and then launched by one call, such as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch


class LaunchGraphs(Protocol):
    """Makes launch graphs, and keeps the memory in which they run.

    Tensors that a graph makes are in memory that no other work gets, for as long as this object is there, also when no
    graph is left. All graphs share this memory, so one run overwrites what the run before has left.
    """

    def settings(self) -> Hashable:
        """What chooses kernels now, besides tensors: under other settings recorded work isn't what calls would do."""
        ...

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        """Records what `work` launches, which nothing runs yet.

        Args:
            work: Launches kernels and copies between tensors of the device, and waits for nothing. It runs on a stream
                of its own, without a wait for other streams.

        Returns:
            Launches the work on the calling thread's current stream. All that it reads must be where it was.

        Raises:
            RuntimeError: If the device can't record it.
        """
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns `nbytes`, one or more, of the memory of the graphs, as `uint8`.

        Nothing else gets it, also once the tensor is gone. So it may be used on any stream.
        """
        ...

    def memory(self, address: int, nbytes: int) -> torch.Tensor:
        """Returns bytes that a graph writes, as `uint8`, though the tensor there is gone."""
        ...
