"""BufferCopies: the buffers that a forward writes, on their way to the device and back, many in one copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from megatrain.memory.block_image import stored_stride
from megatrain.memory.bus import Bus
from megatrain.memory.host_arena import HostArena
from megatrain.tracer.spec import TensorSpec

# Copies of more bytes gain nothing from being one. Packing takes as much memory on the device, for a moment, when only
# weights, inputs and these buffers are there, or what a call keeps for its backward.
GROUP_BYTES = 1 << 20


class BufferCopies:
    """Copies buffers through one page-locked image, without a wait for the device but that for their values at the end.

    A model with BatchNorm has hundreds of them, of a few bytes each. A copy from or to pageable memory would wait for
    the device, buffer by buffer.

    Args:
        bus: To the compute device.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._device = bus.device
        self._image = HostArena(0)

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
        if nbytes > self._image.nbytes:
            self._image = self._bus.arena(nbytes)
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
        """Writes values into buffers on the host, and waits until they are there.

        Args:
            pairs: Each buffer, and its value.
        """
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
