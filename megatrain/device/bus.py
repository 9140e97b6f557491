"""Bus: copies between arenas of the host and the device, straight if the arena is page-locked, else through a ring."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import pairwise

import torch

from megatrain.base.sizes import format_bytes
from megatrain.device import Device, DeviceEvent
from megatrain.device.host_arena import HostArena
from megatrain.errors import ExecuteError, PageLockWarning

BUFFERS = 4
"""Of a ring: while one is filled and another emptied, the device copies a third."""


class Ring:
    """Copies in pieces of a buffer's size. One thread at a time uses a ring.

    Args:
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
        """Copies `uint8` to the host, after the current stream's work. On return it is there."""
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


# Bytes of both rings together: the first size that is tried, and the smallest.
MOST_BYTES, LEAST_BYTES = 256 << 20, 1 << 20
PIECE_BYTES = 1 << 30
"""Of an arena of state, unless a block is larger: while one is filled, the one before is page-locked."""


class Bus:
    """All copies of one engine between its host memory and its device.

    Some systems (WSL2, containers) page-lock no more than a few GiB. There memory stays as it is, and copies go through
    two small rings of page-locked buffers, one for each direction: each byte is copied once more, by the host. If the
    system refuses even these, copies are ordinary ones, which the host waits for.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._rings: tuple[Ring, Ring] | None = None
        self._refused_bytes: int | None = None
        self._early: list[HostArena] = []

    @property
    def note(self) -> str:
        """How copies pass, in words; empty if nothing was refused."""
        if self._refused_bytes is None:
            return ""
        refused = f"the system refused to page-lock {format_bytes(self._refused_bytes)} of host memory"
        if self._rings is None:
            return f"{refused}, and even a ring of {format_bytes(LEAST_BYTES)}: transfers wait for one another"
        nbytes = sum(ring.nbytes for ring in self._rings)
        return f"{refused}: transfers pass through a ring of {format_bytes(nbytes)}, copied once more"

    def arena(self, nbytes: int) -> HostArena:
        """Returns new memory for transfers.

        Raises:
            ExecuteError: If the host can't give it.
        """
        arena = HostArena(nbytes)
        self.lock([arena])
        return arena

    def lock(self, arenas: Sequence[HostArena]) -> None:
        """Page-locks arenas for transfers, all or none; if the system refuses, copies of these go through the rings."""
        # Some were locked early: with the rest refused, a ring needs what the system lets lock.
        fresh = [a for a in arenas if not a.is_refused and (not a.is_locked or a in self._early)]
        if self._rings is None and self._refused_bytes is None and self.device.lock_bytes:
            # Memory of the user's is never locked.
            self._rings = rings(self.device) if any(arena.is_refused for arena in arenas) else None
        try:
            _lock(fresh, self.device)
        except ExecuteError as error:
            for arena in fresh:
                arena.is_refused = True
            if self._refused_bytes is None:
                self._refused_bytes = sum(arena.nbytes for arena in fresh)
                self._rings = rings(self.device)
                way_out = str(error).splitlines()[-1].strip()
                warnings.warn(f"{self.note}. {way_out}", PageLockWarning, stacklevel=2)
        self._early.clear()

    @contextmanager
    def locking(self) -> Generator[Callable[[HostArena], None]]:
        """Page-locks arenas on a thread of its own, each while the body fills the next.

        What the system refuses stays unlocked: `lock` tries it once more, and tells.

        Yields:
            Says which arena is filled from now on. The one before is full: locking makes all of its pages resident.
        """
        pool, begun = ThreadPoolExecutor(1, "megatrain-lock"), list[Future[None]]()
        full: HostArena | None = None

        def begin(arena: HostArena) -> None:
            nonlocal full
            if full is not None and self.device.lock_bytes:
                self._early.append(full)
                begun.append(pool.submit(full.lock, self.device))
            full = arena

        try:
            yield begin
            wait(begun)
        finally:
            # After an interrupt no other arena is begun: the process would end only after the last.
            pool.shutdown(cancel_futures=True)

    def to_device(self, out: torch.Tensor, source: torch.Tensor, arena: HostArena) -> None:
        """Copies to the device, as work of the current stream.

        Args:
            out: Of the device, of the layout of `source`.
            source: A tensor of `arena`, without gaps.
            arena: Some arena that was locked here.
        """
        cuts = arena.cuts(source)
        if arena.is_refused:
            self._through(out, source, is_out=False)
        elif cuts:
            self._in_pieces(out, source, cuts)
        else:
            self.device.copy(out, source)

    def to_host(self, out: torch.Tensor, source: torch.Tensor, arena: HostArena) -> torch.Tensor:
        """Copies to the host, as work of the current stream; what passes through a ring is there on return already.

        Args:
            out: A tensor of `arena`, without gaps.
            source: Of the device, of the same shape and dtype.
            arena: See `to_device`.

        Returns:
            `out`.
        """
        cuts = arena.cuts(out)
        if not (arena.is_refused or cuts):
            return self.device.copy(out, source)
        source = _laid_out_like(out, source)
        if arena.is_refused:
            self._through(out, source, is_out=True)
        else:
            self._in_pieces(out, source, cuts)
        return out

    def _in_pieces(self, out: torch.Tensor, source: torch.Tensor, cuts: Sequence[int]) -> None:
        """No copy may span two pieces that were locked apart."""
        to, of = _bytes(out), _bytes(source)
        for start, end in pairwise([0, *cuts, of.numel()]):
            self.device.copy(to[start:end], of[start:end])

    def _through(self, out: torch.Tensor, source: torch.Tensor, *, is_out: bool) -> None:
        to, of = _bytes(out), _bytes(source)
        if self._rings is None:
            self.device.copy(to, of)
        elif is_out:
            self._rings[1].to_host(to, of)
        else:
            self._rings[0].to_device(to, of)


class GrowingArena:
    """Host memory for transfers that is kept from use to use, and grows if one needs more."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.memory = HostArena(0)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.memory.nbytes

    def ensure(self, nbytes: int) -> HostArena:
        """Returns the memory, at least `nbytes`; other memory than before if it had to grow.

        Raises:
            ExecuteError: If the host can't give it.
        """
        if nbytes > self.nbytes:
            self.clear()  # the old one goes first, unless a tensor views it
            self.memory = self.bus.arena(nbytes)
        return self.memory

    def clear(self) -> None:
        """Lets go of the memory."""
        self.memory = HostArena(0)


def _lock(arenas: Sequence[HostArena], device: Device) -> None:
    """Locks all or none."""
    try:
        for arena in arenas:
            arena.lock(device)
    except BaseException:
        for arena in arenas:
            arena.unlock()
        raise


def rings(device: Device) -> tuple[Ring, Ring] | None:
    """The largest rings that the system lets lock; None if there are none."""
    nbytes = MOST_BYTES
    while nbytes >= LEAST_BYTES:
        buffers = [HostArena(min(nbytes // (2 * BUFFERS), device.lock_bytes)) for _ in range(2 * BUFFERS)]
        try:
            _lock(buffers, device)
        except ExecuteError:
            nbytes //= 2
            continue
        return Ring(device, buffers[:BUFFERS]), Ring(device, buffers[BUFFERS:])
    return None


def _laid_out_like(out: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the device with the strides of `out`, a copy if need be."""
    if source.stride() == out.stride() and not (source.is_conj() or source.is_neg()):
        return source
    return torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=source.device).copy_(source)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor without gaps, as `uint8`."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
