"""Offload buffers: host memory for activations that leave the device, also for a file; images of a model's buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue

import torch

from megatrain.base.sizes import aligned
from megatrain.device.bus import Bus, GrowingArena
from megatrain.device.host_arena import HostArena
from megatrain.files.scratch_file import FileRange, ScratchFile
from megatrain.scheduler.instructions import Bytes, Instruction
from megatrain.tracer.block_image import image, stored_stride, views
from megatrain.tracer.spec import TensorSpec


class OffloadPool:
    """Host memory for parked activations, reused from call to call.

    The largest memory is kept: a call that parks less takes a part of it, so that calls of several shapes in turn don't
    map and page-lock memory each time.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._lock = threading.Lock()
        self._idle: list[HostArena] = []
        # Calls end in finalizers too, which may run while this very thread holds the lock; put() is safe
        # there.
        self._returned: SimpleQueue[HostArena] = SimpleQueue()

    def take(
        self, nbytes: int, num_calls: int, shared_bytes: int = 0, file: ScratchFile | None = None
    ) -> list[OffloadBuffer]:
        """Returns the buffers of the calls of one run; they come back with `OffloadBuffer.give`, or when dropped.

        Args:
            nbytes: Of each.
            num_calls: How many.
            shared_bytes: Of memory for values that go on to a file, before those of the calls: whole pages.
            file: Has these values in between; None if there are none.
        """
        share = aligned(nbytes)
        lease, starts = _Lease(self._arena(shared_bytes + share * num_calls), self._returned), range(num_calls)
        places = (range(shared_bytes + n * share, shared_bytes + n * share + nbytes) for n in starts)
        return [OffloadBuffer(lease, where, self._bus, file) for where in places]

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


class OffloadBuffer:
    """The parked activations of one call, in one range of host memory of their exact size; some through shared memory.

    Made by `OffloadPool.take`. Give it back only when no copy out of it or into it is under way.
    """

    def __init__(self, lease: _Lease, where: range, bus: Bus, file: ScratchFile | None = None) -> None:
        self._lease: _Lease | None = lease
        self._where = where
        self._specs: dict[str, TensorSpec] = {}
        self._places: dict[tuple[str, int], torch.Tensor] = {}
        self._bus = bus
        self._file = file

    @property
    def nbytes(self) -> int:
        """Bytes of host memory taken; 0 once given back."""
        return 0 if self._lease is None else len(self._where)

    @property
    def _arena(self) -> HostArena:
        assert self._lease is not None, "the buffer was given back already"
        return self._lease.arena

    def put(self, name: str, tensor: torch.Tensor, place: Bytes, shared: Bytes | None = None) -> None:
        """Copies a value to the host, on the current stream.

        Args:
            tensor: The value. Its memory may be used again once compute waits for this copy.
            place: Its bytes in the range, or in `shared`; they begin at a multiple of `megatrain.base.sizes.ALIGNMENT`.
            shared: A part of the memory of all calls, from which an `evict` moves the value on; None if none does.
        """
        if name not in self._specs:
            self._specs[name] = TensorSpec.of(tensor)
        self._bus.to_host(self._place(name, place, shared), tensor.detach(), self._arena)

    def get(self, name: str, out: torch.Tensor, place: Bytes, shared: Bytes | None = None) -> None:
        """Copies a value back to the device, on the current stream, into memory that compute has taken for it."""
        self._bus.to_device(out, self._place(name, place, shared), self._arena)

    def evict(self, instruction: Instruction) -> None:
        """Writes what is in shared memory to the file.

        Raises:
            ExecuteError: If the disk fails.
        """
        assert self._file is not None
        self._file.write(_ranges(instruction), self._arena.tensor)

    def reload(self, instruction: Instruction) -> None:
        """Reads what an `evict` has written, into other shared memory.

        Raises:
            ExecuteError: If the disk fails.
        """
        assert self._file is not None
        self._file.read(_ranges(instruction), self._arena.tensor)

    def _place(self, name: str, place: Bytes, shared: Bytes | None) -> torch.Tensor:
        within = self._where if shared is None else range(shared.offset, shared.offset + shared.nbytes)
        start = within.start + place.offset
        if (name, start) not in self._places:
            layout = image([("", self._specs[name])])
            assert place.offset + layout.nbytes <= len(within), "more is parked than was announced"
            (self._places[name, start],) = views(layout, self._arena.tensor[start : start + layout.nbytes])
        return self._places[name, start]

    def give(self) -> None:
        """Returns the memory to the pool; nothing happens the second time."""
        self._places.clear()
        self._lease = self._file = None


def _ranges(instruction: Instruction) -> list[FileRange]:
    shared, place = instruction.buffer, instruction.file
    assert shared is not None
    assert place is not None
    return [FileRange(place.offset, place.nbytes, shared.offset)]


# Copies of more bytes gain nothing from being one. Packing takes as much memory on the device, for a moment, when only
# weights, inputs and these buffers are there, or what a call keeps for its backward.
GROUP_BYTES = 1 << 20


class BufferCopies:
    """Copies buffers through one page-locked image, without a wait for the device but that for their values at the end.

    A model with BatchNorm has hundreds of them, of a few bytes each. A copy from or to pageable memory would wait for
    the device, buffer by buffer.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._device = bus.device
        self._memory = GrowingArena(bus)
        self._image = self._memory.ensure(0)

    def upload(self, buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns copies on the device, as work of the calling thread's current stream.

        A run uploads once, before its transfers begin, and waits at its end for these or for values of the same
        buffers. So nobody reads the image any more when the next run fills it.

        Args:
            buffers: On the host; the caller may drop them at once.
        """
        if self._device.current_stream() is None:
            return {name: self._copied(buffer) for name, buffer in buffers.items()}
        packed = {name: _dense(buffer) for name, buffer in buffers.items() if buffer.layout == torch.strided}
        found = {name: self._copied(buffer) for name, buffer in buffers.items() if name not in packed}
        if packed:
            image = self._image_of([buffer.nbytes for buffer in packed.values()])
            torch.cat([_flat(buffer) for buffer in packed.values()], out=image)
            flat = self._spread(image, [buffer.nbytes for buffer in packed.values()])
            found |= {name: _shaped(data, packed[name]) for name, data in zip(packed, flat, strict=True)}
        return found

    def _copied(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.to(self._device.torch_device, copy=True)

    def _image_of(self, sizes: Sequence[int]) -> torch.Tensor:
        nbytes = sum(sizes)
        self._image = self._memory.ensure(nbytes)
        return self._image.tensor[:nbytes]

    def _spread(self, image: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Copies an image to the device, where each tensor gets memory of its own: one may be dropped before others."""
        device, start = self._device, 0
        found: list[torch.Tensor] = []
        for group in _groups(sizes):
            source = image[start : start + sum(group)]
            start += source.nbytes
            data = torch.empty(source.nbytes, dtype=torch.uint8, device=device.torch_device)
            self._bus.to_device(data, source, self._image)
            if len(group) == 1:
                found.append(data)
                continue
            own = [torch.empty(size, dtype=torch.uint8, device=device.torch_device) for size in group]
            torch.split_with_sizes_copy(data, group, out=own)
            found += own
        return found

    def download(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Writes values into buffers on the host, and waits until they are there."""
        stream, here = self._device.current_stream(), self._device.torch_device
        packed = [p for p in pairs if stream is not None and p[1].layout == torch.strided and p[1].device == here]
        if packed:
            values = [_dense(value) for _, value in packed]
            sizes = [value.nbytes for value in values]
            image, start = self._image_of(sizes), 0
            flat = iter(map(_flat, values))
            for group in _groups(sizes):
                parts = [next(flat) for _ in group]
                end = start + sum(group)
                self._bus.to_host(image[start:end], parts[0] if len(parts) == 1 else torch.cat(parts), self._image)
                start = end
            self._device.synchronize()
            for (buffer, _), value, data in zip(packed, values, image.split(sizes), strict=True):
                buffer.copy_(_shaped(data, value))
        known = {id(buffer) for buffer, _ in packed}
        for buffer, value in pairs:
            if id(buffer) not in known:
                buffer.copy_(value)


def _groups(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Cuts sizes into groups of at most `GROUP_BYTES`; a larger one is a group by itself."""
    group: list[int] = []
    for size in sizes:
        if group and sum(group) + size > GROUP_BYTES:
            yield group
            group = []
        group.append(size)
    yield group


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy, whose elements fill its memory without gaps."""
    plain = tensor.resolve_conj().resolve_neg()
    return plain if plain.stride() == stored_stride(TensorSpec.of(plain)) else plain.contiguous()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, in the order in which they lie."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _shaped(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reads bytes as a tensor of the same dtype, shape and strides; of the host too, where they lie anywhere."""
    if data.storage_offset() % like.element_size():
        data = data.clone()
    return data.view(like.dtype).as_strided(like.shape, like.stride())
