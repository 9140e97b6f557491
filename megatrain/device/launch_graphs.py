"""LaunchGraphs: work of a device that is recorded once and then launched by one call, such as CUDA graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable

import torch

from megatrain.device.kernel_settings import kernel_settings


class LaunchGraphs(ABC):
    """Makes launch graphs, and keeps the memory in which they run.

    Tensors that a graph makes are in memory that no other work gets, for as long as this object is there, also when no
    graph is left. All graphs share this memory, so one run overwrites what the run before has left.

    Args:
        device: Where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settings(self) -> Hashable:
        """What chooses kernels now, besides tensors: under other settings recorded work isn't what calls would do."""
        return kernel_settings()

    @abstractmethod
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

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns `nbytes`, one or more, of the memory of the graphs, as `uint8`.

        Nothing else gets it, also once the tensor is gone. So it may be used on any stream.
        """
        made: list[torch.Tensor] = []
        # By a recording, which is then dropped; an empty one would be warned of.
        self.record(lambda: made.append(torch.zeros(nbytes, dtype=torch.uint8, device=self._device)))
        return made[0]

    @abstractmethod
    def memory(self, address: int, nbytes: int) -> torch.Tensor:
        """Returns bytes that a graph writes, as `uint8`, though the tensor there is gone."""
