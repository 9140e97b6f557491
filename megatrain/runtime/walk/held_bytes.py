"""HeldBytes: the device memory that the tensors of a walk's calls hold: results, caches, what the caller passed in."""

from __future__ import annotations

import torch

from megatrain.device import Device, is_on_host
from megatrain.sizes import aligned
from megatrain.torch_private import StorageWeakRef


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
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, tensor: torch.Tensor) -> int:
        """Counts the memory of a tensor; returns the bytes that weren't known."""
        if tensor.is_meta or is_on_host(tensor) != self._counts_host or tensor.layout != torch.strided:
            return 0
        storage = tensor.untyped_storage()
        # The weak reference keeps the address of the storage from being used again.
        if storage._cdata in self._known:
            return 0
        nbytes = aligned(storage.nbytes(), self._alignment)
        self._known[storage._cdata] = StorageWeakRef(storage), nbytes
        self.nbytes += nbytes
        return nbytes

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Has the memory of a tensor not count, for as long as it exists: views of it are results as well."""
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = StorageWeakRef(storage), 0

    def prune(self) -> None:
        """Stops counting storages that are gone."""
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        self.nbytes = sum(nbytes for _, nbytes in self._known.values())
