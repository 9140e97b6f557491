"""Slots: the places of a block's state while it is on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.runtime.engine import Engine
from megatrain.runtime.stores.host_store import BlockImage, HostStore
from megatrain.scheduler.instructions import Bytes


class Slots:
    """Fills slots from the host store and gives templates views of them, without a copy.

    Args:
        images: Layout of each block's state.
        engine: Holds the store and the arena that slots are cut from.

    Attributes:
        places: The place of each tensor of the blocks' state in the store, by key; for a tensor in parts, of one part.
    """

    def __init__(self, images: Sequence[BlockImage], engine: Engine):
        self._images = images
        self._engine = engine
        self.places = {
            entry.owner: place
            for image in images
            for entry, place in zip(image.entries, self._store.bound(image), strict=True)
        }

    @property
    def _store(self) -> HostStore:
        assert self._engine.store is not None
        return self._engine.store

    def prefetch(self, block: int, where: Bytes | None) -> None:
        """Copies a block's state to bytes of the arena; nothing moves where state is used in place."""
        if where is not None:
            self._store.prefetch(self._images[block], self._engine.arena.slot(*where))

    def state(self, block: int, where: Bytes | None) -> list[torch.Tensor]:
        """Returns a block's state as views of the arena, or of the host store where state is used in place."""
        layout, arena = self._images[block], self._engine.arena
        if where is None:
            return self._store.bound(layout)
        # The engine keeps each image for good, so its address is a name.
        key = (id(layout), where.offset)
        return arena.kept_views(key, lambda: self._store.views(layout, arena.slot(*where)))

    def poison(self, ranges: Sequence[Bytes]) -> None:
        """Fills released bytes with NaN, if a test asked for it."""
        chaos = self._engine.chaos
        if chaos is not None and chaos.poison:
            for where in ranges:
                self._engine.arena.slot(*where).fill_(0xFF)
