"""Ring: a few page-locked buffers, used in turn, through which copies of one direction pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from megatrain.device import Device, DeviceEvent
from megatrain.memory.host_arena import HostArena

BUFFERS = 4
"""Of a ring: while one is filled and another emptied, the device copies a third."""


class Ring:
    """Copies in pieces of a buffer's size. One thread at a time uses a ring.

    Args:
        device: The device.
        buffers: Page-locked, of one size.
    """

    def __init__(self, device: Device, buffers: Sequence[HostArena]) -> None:
        self._device = device
        self._buffers = deque(arena.tensor for arena in buffers)
        # The end of the device's last work with each buffer, in the same order.
        self._ends: deque[DeviceEvent | None] = deque([None] * len(buffers))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() for buffer in self._buffers)

    def to_device(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Copies `uint8` to the device, as work of the current stream. On return `source` may be overwritten."""
        for start, end in self._pieces(source):
            buffer = self._next()[: end - start]
            buffer.copy_(source[start:end])
            self._device.copy(out[start:end], buffer)
            self._note()

    def to_host(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Copies `uint8` to the host, behind the current stream's work. On return it is there."""
        arriving: deque[tuple[torch.Tensor, torch.Tensor, DeviceEvent | None]] = deque()
        for start, end in self._pieces(source):
            if len(arriving) == len(self._buffers):
                self._arrive(*arriving.popleft())
            buffer = self._next()[: end - start]
            self._device.copy(buffer, source[start:end])
            arriving.append((out[start:end], buffer, self._note()))
        for piece in arriving:
            self._arrive(*piece)

    def _pieces(self, source: torch.Tensor) -> Iterator[tuple[int, int]]:
        size = self._buffers[0].numel()
        for start in range(0, source.numel(), size):
            yield start, min(start + size, source.numel())

    def _next(self) -> torch.Tensor:
        """The buffer that was used longest ago, when the device is done with it."""
        end = self._ends[0]
        if end is not None:
            self._device.wait_for(end)
        self._buffers.rotate(-1)
        self._ends.rotate(-1)
        return self._buffers[-1]

    def _note(self) -> DeviceEvent | None:
        """Notes that the device's present work with the latest buffer isn't done before this point."""
        stream = self._device.current_stream()
        end = self._ends[-1] = None if stream is None else stream.record_event()
        return end

    def _arrive(self, out: torch.Tensor, buffer: torch.Tensor, end: DeviceEvent | None) -> None:
        if end is not None:
            self._device.wait_for(end)
        out.copy_(buffer)
