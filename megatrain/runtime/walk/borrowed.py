"""Borrowed: one tensor of the model's state while it is on the device, in a walk."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from megatrain.memory.block_image import stored_stride
from megatrain.runtime.streams.stream_set import Event
from megatrain.torch_private import storage_use_count
from megatrain.tracer.inventory import StateEntry


@dataclass(slots=True, eq=False)
class Borrowed:
    """A copy of a parameter or buffer in device memory of its own.

    Args:
        key: Of the state.
        tensor: The copy.
        arrived: Settled when its values are there.
        is_waited_for: Compute waits for `arrived` already.
        latest: The number of the call that read it last; 0 before the first.
        is_compared: Its memory may be written without its version counting that, so its values tell.
    """

    key: str
    tensor: torch.Tensor
    arrived: Event
    is_waited_for: bool = False
    latest: int = 0
    is_compared: bool = False
    _alone: tuple[int, int] = (0, 0)
    _version: int = 0

    @staticmethod
    def of(entry: StateEntry, device: torch.device) -> tuple[Borrowed, torch.Tensor]:
        """Takes memory; also returns the tensor for the transfer, whose writes the copy doesn't count as the model's.

        The copy of a trained parameter requires a gradient, as kernels look at that: they round differently.
        """
        spec = entry.spec
        memory = torch.empty_strided(spec.shape, stored_stride(spec), dtype=spec.dtype, device=device)
        copy = memory.data.requires_grad_(entry.requires_grad)
        return Borrowed(entry.key, copy, Event(f"W {entry.key}")), memory

    @property
    def is_written(self) -> bool:
        """Whether the model has written into it since `note`."""
        return self.tensor._version != self._version

    def note(self) -> None:
        """Notes that only the walk has it, as it is now."""
        self._alone = self._holders()
        self.note_version()

    def note_version(self) -> None:
        """Notes that the writes so far are known."""
        self._version = self.tensor._version

    @property
    def is_alone(self) -> bool:
        """Whether only the walk has it. A view that the model still has keeps the memory, and may be written into."""
        return self._holders() == self._alone

    def _holders(self) -> tuple[int, int]:
        return storage_use_count(self.tensor.untyped_storage()._cdata), sys.getrefcount(self.tensor)
