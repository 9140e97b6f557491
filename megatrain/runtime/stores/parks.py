"""Parks: host memory for activations that leave the device between forward and backward."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue

import torch

from megatrain.device import Device
from megatrain.memory.block_image import image, views
from megatrain.memory.host_arena import HostArena
from megatrain.tracer.spec import TensorSpec


class ParkPool:
    """Host memory for parked activations, page-locked where that helps, reused from call to call.

    Args:
        device: Compute device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._idle: dict[int, list[HostArena]] = {}
        # Calls end in finalizers too, which may run while this very thread holds the lock; put() is safe
        # there.
        self._returned: SimpleQueue[HostArena] = SimpleQueue()

    @property
    def idle_bytes(self) -> int:
        """Bytes held for later calls."""
        with self._lock:
            self._collect()
            return sum(nbytes * len(arenas) for nbytes, arenas in self._idle.items())

    def take(self, nbytes: int) -> Parks:
        """Returns the parks of one call; they come back with `Parks.give`, or when dropped.

        Args:
            nbytes: Bytes of all values that will be parked.
        """
        return Parks(self._arena(nbytes), self._returned, self._device)

    def _arena(self, nbytes: int) -> HostArena:
        if not nbytes:
            return HostArena(0)
        with self._lock:
            self._collect()
            if self._idle.get(nbytes):
                return self._idle[nbytes].pop()
            # Calls of this shape may never come again, so idle memory is dropped.
            self._idle.clear()
        return HostArena(nbytes, pin=self._device)

    def _collect(self) -> None:
        while True:
            try:
                arena = self._returned.get_nowait()
            except Empty:
                return
            self._idle.setdefault(arena.nbytes, []).append(arena)

    def trim(self) -> None:
        """Releases all memory that no call uses."""
        with self._lock:
            self._collect()
            self._idle.clear()


class Parks:
    """The parked activations of one call, in one range of host memory of their exact size.

    Made by `ParkPool.take`. Give it back only when no copy out of it or into it is under way.
    """

    def __init__(self, arena: HostArena, pool: SimpleQueue[HostArena], device: Device) -> None:
        self._arena: HostArena | None = arena
        self._pool = pool
        self._places: dict[str, torch.Tensor] = {}
        self._device = device

    @property
    def nbytes(self) -> int:
        """Bytes of host memory taken; 0 once given back."""
        return 0 if self._arena is None else self._arena.nbytes

    def put(self, name: str, tensor: torch.Tensor, offset: int) -> None:
        """Copies a value to the host, on the current stream.

        Args:
            name: By which `get` finds it.
            tensor: The value. Its memory may be used again once compute waits for this copy.
            offset: Its first byte in the range, at a multiple of `megatrain.sizes.ALIGNMENT`.
        """
        if name not in self._places:
            self._places[name] = self._new_place(TensorSpec.of(tensor), offset)
        self._device.copy(self._places[name], tensor.detach())

    def get(self, name: str, out: torch.Tensor) -> None:
        """Copies a value back to the device, on the current stream, into memory that compute has taken for it."""
        self._device.copy(out, self._places[name])

    def _new_place(self, spec: TensorSpec, offset: int) -> torch.Tensor:
        assert self._arena is not None, "the parks were given back already"
        layout = image([("", spec)])
        assert offset + layout.nbytes <= self._arena.nbytes, "more is parked than was announced"
        (place,) = views(layout, self._arena.tensor[offset : offset + layout.nbytes])
        return place

    def give(self) -> None:
        """Returns the memory to the pool; nothing happens the second time."""
        arena, self._arena = self._arena, None
        self._places.clear()
        if arena is not None and arena.nbytes:
            self._pool.put(arena)

    def __del__(self) -> None:
        self.give()
