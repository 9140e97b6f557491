"""WeightShards: the devices of a host gather weights (all-gather): each rank copies one shard from the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatrain.device import Device
from megatrain.ranks.channels.channel import GoOn
from megatrain.sizes import device_shard_bytes

Wait = Callable[[Callable[[], Sequence[Any]], GoOn], None]
"""Begins collectives of devices on the current stream, and waits for their end there."""


class WeightShards:
    """The ranks of a host, which divide the copies of weights to their devices. All of them make it at the same time.

    Args:
        store: Where they find each other, and nobody else does.
        index: The place of this rank among them.
        size: How many they are.
        device: Where the weights go.
        wait: See `Wait`.
        timeout: After which a collective fails.

    Raises:
        RanksError: If nothing moves shards between such devices.
    """

    def __init__(self, store: dist.Store, index: int, size: int, device: Device, wait: Wait, timeout: timedelta):
        self._index, self._size, self._wait = index, size, wait
        self.group: Any = device.collectives(store, index, size, timeout)

    def spans(self, nbytes: int) -> Sequence[tuple[int, int]]:
        """The bytes of a block that this rank copies: its shard, and what belongs to none."""
        shard = device_shard_bytes(nbytes, self._size)
        return [(self._index * shard, (self._index + 1) * shard), (self._size * shard, nbytes)]

    def gather(self, slot: torch.Tensor, go_on: GoOn) -> None:
        """Fills a slot that has this rank's shard with those of the others; all ranks of the host call it.

        Args:
            slot: Bytes of the device, as many as the block has.
            go_on: Raises an error if this rank can't go on.

        Raises:
            RanksError: If another rank can't.
        """
        # A broadcast of each shard, in place: an all-gather of a list would take as much memory again on CUDA.
        shards = slot.split(device_shard_bytes(slot.numel(), self._size))[: self._size]
        self._wait(lambda: [self.group.broadcast([s], _from(root)) for root, s in enumerate(shards)], go_on)


def _from(root: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options
