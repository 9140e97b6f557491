"""Slots: where a block's state lies while it is on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.runtime.engine import Engine
from megatrain.runtime.host import BlockImage, HostStore
from megatrain.scheduler.schedule import Schedule


class Slots:
    """Fills the slots of a schedule from the host store and shows templates what is in them, without a copy.

    Args:
        schedule: Names the slots.
        images: Layout of each block's state.
        engine: Holds the store and the arena that slots are cut from.

    Attributes:
        places: Where each tensor of the blocks' state lies in the store, by key; of one in parts, the place of a part.
    """

    def __init__(self, schedule: Schedule, images: Sequence[BlockImage], engine: Engine):
        self._schedule = schedule
        self._images = images
        self._engine = engine
        self._is_bound = schedule.kind.transfer == "bind"
        self._views: dict[tuple[int, int, int], list[torch.Tensor]] = {}
        self.places = {
            entry.owner: place
            for image in images
            for entry, place in zip(image.entries, self._store.bound(image), strict=True)
        }

    @property
    def _store(self) -> HostStore:
        assert self._engine.store is not None
        return self._engine.store

    def prefetch(self, block: int, slot: int) -> None:
        """Copies a block's state into a slot; nothing moves where state is used in place."""
        if not self._is_bound:
            self._store.prefetch(self._images[block], self._buffer(block, slot))

    def state(self, block: int, slot: int | None) -> list[torch.Tensor]:
        """Returns a block's state as views of its slot, or of the host store where it is used in place."""
        if self._is_bound or slot is None:
            return self._store.bound(self._images[block])
        key = (block, slot, self._engine.arena.generation)
        if key not in self._views:
            self._views[key] = self._store.views(self._images[block], self._buffer(block, slot))
        return self._views[key]

    def poison(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Fills freed bytes `(offset, length)` with NaN, if a test asked for it."""
        chaos = self._engine.chaos
        if chaos is not None and chaos.poison and not self._is_bound:
            for offset, nbytes in ranges:
                self._engine.arena.slot(offset, nbytes).fill_(0xFF)

    def _buffer(self, block: int, slot: int) -> torch.Tensor:
        return self._engine.arena.slot(self._schedule.slots[slot].offset, self._images[block].nbytes)
