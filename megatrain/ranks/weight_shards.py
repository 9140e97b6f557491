"""WeightShards: the devices of a host gather weights (all-gather): each rank copies one shard from the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatrain.device import Device
from megatrain.ranks.channels.channel import GoOn
from megatrain.sizes import device_shard_bytes

PROBE_BYTES = 64 << 20
"""What is gathered to measure a link: about the weights of a layer."""
_ROUNDS = 5
Wait = Callable[[Callable[[], Sequence[Any]], GoOn], None]
"""Begins collectives of devices on the current stream, and waits for their end there."""


class WeightShards:
    """The ranks of a host, which divide the copies of weights to their devices. All of them make it at the same time.

    Args:
        index: The place of this rank among them.
        size: How many they are.
        wait: See `Wait`.
        group: A backend of `torch.distributed` that moves memory between their devices.
    """

    def __init__(self, index: int, size: int, wait: Wait, group: Any):
        self._index, self._size, self._wait, self.group = index, size, wait, group

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

    def measured_rate(self, device: Device, go_on: GoOn) -> float:
        """Bytes that this device gets from the others in a second while all gather; all ranks of the host call it.

        Args:
            device: As above; it needs `PROBE_BYTES` for a moment.
            go_on: As in `gather`.

        Raises:
            RanksError: If another rank can't.
        """
        slot = device.allocate(PROBE_BYTES)
        seconds: list[float] = []
        for _ in range(1 + _ROUNDS):  # the first one makes connections
            begin = time.perf_counter()
            self.gather(slot, go_on)
            device.synchronize()
            seconds.append(time.perf_counter() - begin)
        del slot
        device.empty_cache()  # no plan counts it
        received = (self._size - 1) * device_shard_bytes(PROBE_BYTES, self._size)
        return received / statistics.median(seconds[1:])


def _from(root: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options
