"""Persisting: frozen weights that stay on the device across steps, and whether those of the host are still the same."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from megatrain.errors import ExecuteError
from megatrain.memory.block_image import BlockImage

# Bytes of each tensor that every step compares, and bytes of all of them of which one step takes the sums.
_SAMPLES = 256
_PIECE = 64 << 20
_COLUMNS = 4096

Stamp = tuple[tuple[int, int], ...]
"""Of each tensor: which memory it has had, and torch's count of the writes into it."""


@dataclass(slots=True, eq=False)
class Persisting:
    """The frozen weights of one block as they were copied to the device.

    A write that torch counts, and new memory, change the stamp. Writes through `.data` and NumPy aren't counted. Most
    of them write whole tensors, so each step compares a sample of each tensor. The others are found by sums of all
    bytes, of which every step takes a part.

    Args:
        name: Of the block, for the error.
        layout: The image in which they are.
        keys: Its entries that are frozen.
        stamp: When they were copied.
    """

    name: str
    layout: BlockImage
    keys: frozenset[str]
    stamp: Stamp
    _samples: list[tuple[torch.Tensor, torch.Tensor]]
    _sums: list[tuple[torch.Tensor, torch.Tensor]]
    _next: int = 0

    @staticmethod
    def of(
        name: str, layout: BlockImage, keys: frozenset[str], stamp: Stamp, tensors: Sequence[torch.Tensor]
    ) -> Persisting:
        """Reads the weights once.

        Args:
            name: See above, like the next three.
            layout: See there.
            keys: See there.
            stamp: See there.
            tensors: Their bytes on the host, `uint8`.
        """
        # An odd distance meets all bytes of the elements in turn: a small change may leave the high ones as they are.
        samples = [tensor[:: tensor.numel() // _SAMPLES | 1] for tensor in tensors]
        pieces = [piece for tensor in tensors for piece in tensor.split(_PIECE)]
        return Persisting(
            name,
            layout,
            keys,
            stamp,
            [(s, s.clone()) for s in samples],
            [(piece, sums_of_bytes(piece)) for piece in pieces],
        )

    @property
    def key(self) -> Hashable:
        """Which weights they are: an engine keeps each image for good, so its address is a name."""
        return id(self.layout), self.keys

    def is_same(self, stamp: Stamp) -> bool:
        """Tells whether the host still has these weights, as far as a look at each tensor says."""
        return stamp == self.stamp and all(torch.equal(now, before) for now, before in self._samples)

    def check_next(self) -> None:
        """Compares the sums of the next part of the bytes.

        Raises:
            ExecuteError: If something was written that torch doesn't count, and `is_same` can't see.
        """
        piece, before = self._sums[self._next]
        if not torch.equal(sums_of_bytes(piece), before):
            raise ExecuteError(
                f"frozen weights of block {self.name} have changed in a way that torch doesn't count.\n"
                "  Frozen weights stay on the device across training steps; steps since then had the old values.\n"
                "  Write with `with torch.no_grad(): parameter.copy_(...)`, which torch counts, not through `.data` or "
                "NumPy; or don't freeze them."
            )
        self._next = (self._next + 1) % len(self._sums)


def sums_of_bytes(piece: torch.Tensor) -> torch.Tensor:
    """Sums of the bytes in many columns, of whole numbers that wrap around, and the bytes of the rest as they are.

    One changed byte changes a sum.
    """
    row = 8 * _COLUMNS
    piece = piece if piece.storage_offset() % 8 == 0 else piece.clone()  # else it has no view as larger numbers
    whole = piece.numel() // row * row
    columns = piece[:whole].view(torch.int64).view(-1, _COLUMNS).sum(0)
    return torch.cat([columns.view(torch.uint8), piece[whole:]])
