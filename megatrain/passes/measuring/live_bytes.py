"""LiveBytes: the bytes of a device that a run without memory would take."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from megatrain.device import is_on_host
from megatrain.passes.measuring.kernel_buffers import private_bytes
from megatrain.torch_private import TorchDispatchMode
from megatrain.tracer.packed.packing import has_wrappers


class LiveBytes(TorchDispatchMode):
    """Follows the bytes of storages made on the compute device while it is active, and of kernels' own buffers.

    Args:
        known: Tensors that don't count.
        device: The compute device.

    Attributes:
        current: Bytes alive now.
        peak: Most bytes alive at once.
        peak_parts: The bytes of each storage that was alive then, and of a kernel's own buffers.
    """

    def __init__(self, known: list[torch.Tensor], device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._alive: dict[int, int] = {}  # bytes of each storage
        self._known = {t.untyped_storage()._cdata for t in known}  # pyright: ignore[reportPrivateUsage]
        self.current = 0
        self.peak = 0
        self.peak_parts: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_wrappers(types):
            return NotImplemented  # its class computes with plain tensors, and comes here again with these
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor) and item.layout == torch.strided and is_on(item, self._device):
                self._add(item.untyped_storage())
        self._note(private_bytes(func, args))
        return result

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._alive:
            return
        weakref.finalize(storage, self._remove, key)
        self._alive[key] = size
        self.current += size
        self._note(0)

    def _note(self, private: int) -> None:
        if self.current + private > self.peak:
            self.peak = self.current + private
            self.peak_parts = (*self._alive.values(), private)

    def _remove(self, key: int) -> None:
        self.current -= self._alive.pop(key)


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Tells whether a tensor takes memory of the compute device, rather than of the host beside it."""
    return is_on_host(device) or not is_on_host(tensor)
