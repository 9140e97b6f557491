"""Parks: host memory for activations that leave the device between forward and backward."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue

import torch

from megatrain.memory.block_image import image, views
from megatrain.memory.bus import Bus
from megatrain.memory.host_arena import HostArena
from megatrain.sizes import aligned
from megatrain.tracer.spec import TensorSpec


class ParkPool:
    """Host memory for parked activations, reused from call to call.

    The largest memory is kept: a call that parks less takes a part of it, so that calls of several shapes in turn don't
    map and page-lock memory each time.

    Args:
        bus: Takes values to the host and back.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._lock = threading.Lock()
        self._idle: list[HostArena] = []
        # Calls end in finalizers too, which may run while this very thread holds the lock; put() is safe
        # there.
        self._returned: SimpleQueue[HostArena] = SimpleQueue()

    @property
    def idle_bytes(self) -> int:
        """Bytes held for later calls."""
        with self._lock:
            self._collect()
            return sum(arena.nbytes for arena in self._idle)

    def take(self, nbytes: int, num_calls: int) -> list[Parks]:
        """Returns the parks of the calls of one run; they come back with `Parks.give`, or when dropped.

        Args:
            nbytes: Bytes of all values that each call will park.
            num_calls: How many calls.

        Raises:
            ExecuteError: If the host can't give the memory.
        """
        share = aligned(nbytes)
        lease = _Lease(self._arena(share * num_calls), self._returned)
        return [Parks(lease, range(n * share, n * share + nbytes), self._bus) for n in range(num_calls)]

    def _arena(self, nbytes: int) -> HostArena:
        if not nbytes:
            return HostArena(0)
        with self._lock:
            self._collect()
            fitting = [arena for arena in self._idle if arena.nbytes >= nbytes]
            if fitting:
                found = min(fitting, key=lambda arena: arena.nbytes)
                self._idle.remove(found)
                return found
            # The new memory serves their calls as well.
            self._idle.clear()
        return self._bus.arena(nbytes)

    def _collect(self) -> None:
        while True:
            try:
                self._idle.append(self._returned.get_nowait())
            except Empty:
                return


class _Lease:
    """Memory of the pool in use; returns with its last user."""

    def __init__(self, arena: HostArena, pool: SimpleQueue[HostArena]) -> None:
        self.arena = arena
        self._pool = pool

    def __del__(self) -> None:
        if self.arena.nbytes:
            self._pool.put(self.arena)


class Parks:
    """The parked activations of one call, in one range of host memory of their exact size.

    Made by `ParkPool.take`. Give it back only when no copy out of it or into it is under way.
    """

    def __init__(self, lease: _Lease, where: range, bus: Bus) -> None:
        self._lease: _Lease | None = lease
        self._where = where
        self._places: dict[str, torch.Tensor] = {}
        self._bus = bus

    @property
    def nbytes(self) -> int:
        """Bytes of host memory taken; 0 once given back."""
        return 0 if self._lease is None else len(self._where)

    @property
    def _arena(self) -> HostArena:
        assert self._lease is not None, "the parks were given back already"
        return self._lease.arena

    def put(self, name: str, tensor: torch.Tensor, offset: int) -> None:
        """Copies a value to the host, on the current stream.

        Args:
            name: By which `get` finds it.
            tensor: The value. Its memory may be used again once compute waits for this copy.
            offset: Its first byte in the range, at a multiple of `megatrain.sizes.ALIGNMENT`.
        """
        if name not in self._places:
            self._places[name] = self._new_place(TensorSpec.of(tensor), offset)
        self._bus.to_host(self._places[name], tensor.detach(), self._arena)

    def get(self, name: str, out: torch.Tensor) -> None:
        """Copies a value back to the device, on the current stream, into memory that compute has taken for it."""
        self._bus.to_device(out, self._places[name], self._arena)

    def _new_place(self, spec: TensorSpec, offset: int) -> torch.Tensor:
        layout = image([("", spec)])
        assert offset + layout.nbytes <= len(self._where), "more is parked than was announced"
        start = self._where.start + offset
        (place,) = views(layout, self._arena.tensor[start : start + layout.nbytes])
        return place

    def give(self) -> None:
        """Returns the memory to the pool; nothing happens the second time."""
        self._places.clear()
        self._lease = None
