"""HeldBytes: the device memory that the tensors of a walk's calls hold: results, caches, what the caller passed in."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatrain.device import Device, is_on_host
from megatrain.sizes import aligned
from megatrain.torch_private import StorageWeakRef


class _Known(NamedTuple):
    storage: StorageWeakRef
    nbytes: int
    key: str | None


class HeldBytes:
    """Counts each storage of the device that a call took or returned, once, for as long as it exists.

    Sizes are rounded up as the device's allocator does. Nobody says when a tensor of the model's own code ends, so
    storages are referred to weakly, and looked at when the sum matters.

    Args:
        device: The compute device.

    Attributes:
        nbytes: Bytes of the known storages; those that are gone count until `prune`.
    """

    def __init__(self, device: Device) -> None:
        self.nbytes = 0
        self._counts_host = device.is_host
        self._alignment = device.alignment
        self._known: dict[int, _Known] = {}

    def look_at(self, tensor: torch.Tensor) -> str | None:
        """Counts the memory of a tensor, if it isn't known; returns the key of the state that it is, if it is one's."""
        if tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is not None:
            return known.key
        if not tensor.is_meta and is_on_host(tensor) == self._counts_host:
            self._note(storage, aligned(storage.nbytes(), self._alignment), None)
        return None

    def leave_out(self, tensor: torch.Tensor, key: str) -> None:
        """Has the memory of a tensor not count, for as long as it exists: it is that of some state."""
        self._note(tensor.untyped_storage(), 0, key)

    def prune(self) -> None:
        """Stops counting storages that are gone."""
        gone = [number for number, known in self._known.items() if known.storage.expired()]
        for number in gone:
            self.nbytes -= self._known.pop(number).nbytes

    def _note(self, storage: torch.UntypedStorage, nbytes: int, key: str | None) -> None:
        # The weak reference keeps the address of the storage from being used again.
        self._known[storage._cdata] = _Known(StorageWeakRef(storage), nbytes, key)
        self.nbytes += nbytes
