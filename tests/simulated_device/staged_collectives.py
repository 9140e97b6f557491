"""StagedCollectives: broadcasts between simulated devices, through host memory, in the order of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class StagedCollectives:
    """What moves memory between the devices of some processes; see `megatrain.device.Device.collectives`."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        self._host: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._rank = rank

    def broadcast(self, tensors: Sequence[torch.Tensor], options: dist.BroadcastOptions) -> Any:
        """Sends a tensor to all, behind the work of the current stream and ahead of what follows there."""
        (tensor,) = tensors
        staged = tensor.cpu() if options.rootRank == self._rank else torch.empty(tensor.shape, dtype=tensor.dtype)
        self._host.broadcast([staged], options).wait()
        if options.rootRank != self._rank:
            tensor.copy_(staged)
        return _Done()


class _Done:
    def is_completed(self) -> bool:
        """It is over on return."""
        return True

    def wait(self) -> None:
        """Nothing is left."""
