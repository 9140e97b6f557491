"""Slots: the places of a block's state while it is on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatrain.errors import ExecuteError
from megatrain.passes.program import Program
from megatrain.runtime.call_start import sampled
from megatrain.runtime.engine import Engine
from megatrain.runtime.stores.host_store import BlockImage, HostStore
from megatrain.runtime.stores.persisting import Persisting
from megatrain.scheduler.instructions import Bytes
from megatrain.scheduler.table import Table


class Slots:
    """Fills slots from the host store and gives templates views of them, without a copy.

    Args:
        images: Layout of each block's state.
        engine: Holds the store and the arena that slots are cut from.
        program: Whose blocks they are.
        schedule: Says whose frozen weights stay.
    """

    def __init__(self, images: Sequence[BlockImage], engine: Engine, program: Program, schedule: Table):
        self._images = images
        self._program = program
        self._engine = engine
        self._places: dict[str, torch.Tensor] = {}
        self._at: int | None = None
        self._sampled: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]] | None = None
        self._frozen = {
            block: frozenset(k for k in program.blocks[block].binding if not program.state[k].requires_grad)
            for block in schedule.persistent
        }
        self._num_uses = 0

    @property
    def _store(self) -> HostStore:
        assert self._engine.store is not None
        return self._engine.store

    @property
    def places(self) -> Mapping[str, torch.Tensor]:
        """The place of each tensor of the blocks' state in the store, by key; for a tensor in parts, of one part."""
        if self._at != self._store.num_moves:
            self._at = self._store.num_moves
            self._places = {
                entry.owner: place
                for image in self._images
                for entry, place in zip(image.entries, self._store.bound(image), strict=True)
            }
        return self._places

    def samples(self, keys: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """Returns some bytes of the state of these keys, the same keys each time, as it is in the store."""
        places = self.places
        if self._sampled is None or self._sampled[0] is not places:
            self._sampled = places, {key: sampled(places[key]) for key in keys if places[key].numel()}
        return self._sampled[1]

    def prefetch(self, block: int, where: Bytes | None, *, persists: bool = False) -> None:
        """Copies a block's state to the arena; nothing where state is used in place.

        Args:
            block: The block.
            where: The bytes.
            persists: Its frozen weights may be there from an earlier step.

        Raises:
            ExecuteError: If frozen weights were changed unseen.
        """
        if where is not None and persists:
            self._prefetch_changing(block, where)
        elif where is not None:
            self._store.prefetch(self._images[block], self._engine.arena.write(*where))

    def _prefetch_changing(self, block: int, where: Bytes) -> None:
        """Copies the part of a block's state that changes from step to step, and the rest if it isn't there."""
        arena, layout, frozen = self._engine.arena, self._images[block], self._frozen[block]
        stamp, known, key = self._store.stamp(layout, frozen), arena.persisting(*where), (id(layout), frozen)
        if known is None or stamp is None or known.key != key or not known.is_same(stamp):
            self._store.prefetch(layout, arena.write(*where))
            if stamp is not None:
                known = arena.remembered(key)
                if known is None or not known.is_same(stamp):
                    name, weights = self._program.blocks[block].name, self._store.bytes_of(layout, frozen)
                    known = Persisting.of(name, layout, frozen, stamp, weights)
                arena.persist(*where, known)
            return
        self._num_uses += 1
        # Each step checks a part of about one block, of another one each time.
        if self._num_uses % (len(self._frozen) + 1) == 0:
            try:
                known.check_next()
            except ExecuteError:
                arena.forget(key)
                raise
        self._store.prefetch(layout, arena.slot(*where), without=frozen)

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
