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
        is_root = options.rootRank == self._rank
        staged = tensor.cpu() if is_root else torch.empty(tensor.shape, dtype=tensor.dtype)
        return _Staged(self._host.broadcast([staged], options), staged, None if is_root else tensor)


class _Staged:
    """A broadcast under way between hosts; who waits for it copies it to the device."""

    def __init__(self, work: Any, staged: torch.Tensor, out: torch.Tensor | None):
        self._work, self._staged, self._out = work, staged, out

    def is_completed(self) -> bool:
        """Whether it is over on the host."""
        return self._work.is_completed()

    def wait(self) -> None:
        """Copies it, as work of the current stream."""
        self._work.wait()
        if self._out is not None:
            self._out.copy_(self._staged)
