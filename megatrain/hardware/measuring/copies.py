"""Copies: rates of the link between host and device, each way alone and both ways at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from megatrain.device import Device, DeviceStream
from megatrain.errors import ExecuteError
from megatrain.hardware.measuring.timing import rates_together, seconds_of
from megatrain.memory.host_arena import HostArena

# Copies within the host have to be larger than its caches.
_BYTES, _HOST_BYTES = 32 << 20, 96 << 20
_COPIES = 8


class Link:
    """Memory of both sides, and the copies between.

    Args:
        device: The device.

    Attributes:
        is_locked: Whether the host's memory is page-locked, if the device gains from that.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._nbytes = _HOST_BYTES if device.is_host else _BYTES
        self._arenas = [HostArena(self._nbytes) for _ in range(2)]
        self._there = [device.allocate(self._nbytes) for _ in range(2)]
        self.is_locked = True
        try:
            for arena in self._arenas:
                arena.lock(device)
        except ExecuteError:
            self.is_locked = False

    def close(self) -> None:
        """Gives all of it back."""
        for arena in self._arenas:
            arena.unlock()
            arena.close()
        self._there.clear()

    def to_device(self) -> None:
        """One copy to the device."""
        self._device.copy(self._there[0], self._arenas[0].tensor)

    def to_host(self) -> None:
        """One copy to the host."""
        self._device.copy(self._arenas[1].tensor, self._there[1])

    def alone(self) -> tuple[float, float]:
        """Bytes per second each way."""
        taken = [seconds_of(self._device, copy, least_s=0.1) for copy in (self.to_device, self.to_host)]
        return self._nbytes / taken[0], self._nbytes / taken[1]

    def pageable(self) -> float:
        """Bytes per second to the device, of memory that isn't page-locked."""
        plain = torch.zeros(self._nbytes, dtype=torch.uint8)
        return self._nbytes / seconds_of(self._device, partial(self._device.copy, self._there[0], plain), least_s=0.05)

    def both(self) -> tuple[float, float]:
        """Bytes per second each way while both ways are under way."""
        streams = [self._device.new_stream() for _ in range(2)]
        if streams[0] is None or streams[1] is None:
            return self._both_by_threads()
        return self._both_by_streams(streams[0], streams[1])

    def _both_by_streams(self, up: DeviceStream, down: DeviceStream) -> tuple[float, float]:
        device, before = self._device, self._device.current_stream()
        assert before is not None
        base = device.moment()
        start, moments = before.record_event(), [[], []]
        for stream in (up, down):
            stream.wait_event(start)
        for _ in range(_COPIES):
            for stream, copy, found in ((up, self.to_device, moments[0]), (down, self.to_host, moments[1])):
                device.enter(stream)
                copy()
                found.append(device.moment())
        device.enter(before)
        ends = [[0.0, *(moment.seconds_since(base) for moment in found)] for found in moments]
        one, other = rates_together(ends, self._nbytes)
        return one, other

    def _both_by_threads(self) -> tuple[float, float]:
        ends: list[list[float]] = [[], []]
        barrier = threading.Barrier(2)

        def run(copy: Callable[[], None], found: list[float]) -> None:
            barrier.wait()
            found.append(time.perf_counter())
            # Until both have copied: a busy machine may start one long after the other.
            while len(found) <= 2 * _COPIES or min(map(len, ends)) <= 2 * _COPIES:
                copy()
                found.append(time.perf_counter())

        copies = (self.to_device, self.to_host)
        threads = [threading.Thread(target=run, args=pair) for pair in zip(copies, ends, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        one, other = rates_together(ends, self._nbytes)
        return one, other
