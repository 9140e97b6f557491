"""Slots: the state of blocks on the device, in one arena; frozen weights may stay there from step to step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatrain.device import Device
from megatrain.errors import ExecuteError
from megatrain.passes.program import Program
from megatrain.runtime.stores.host_store import HostStore, Writes
from megatrain.runtime.versions import Sample, sampled, sums_of_bytes
from megatrain.scheduler.instructions import Bytes
from megatrain.scheduler.table import Table
from megatrain.tracer.block_image import BlockImage, views

# Bytes of each tensor that every step compares, and bytes of all of them of which one step takes the sums.
_SAMPLES = 256
_PIECE = 64 << 20


@dataclass(slots=True, eq=False)
class Persisting:
    """The frozen weights of one block as they were copied to the device.

    A write that torch counts, and new memory, change the stamp. Writes through `.data` and NumPy aren't counted. Most
    of them write whole tensors, so each step compares a sample of each tensor. The others are found by sums of all
    bytes, of which every step takes a part.
    """

    name: str
    layout: BlockImage
    keys: frozenset[str]
    stamp: Writes
    _samples: Mapping[str, torch.Tensor]
    _sampled: Sample
    _sums: list[tuple[torch.Tensor, torch.Tensor]]
    _next: int = 0

    @staticmethod
    def of(
        name: str,
        layout: BlockImage,
        keys: frozenset[str],
        stamp: Writes,
        tensors: Sequence[torch.Tensor],
    ) -> Persisting:
        """Reads the weights once; `tensors` are their bytes on the host, `uint8`. For the others see the class."""
        samples = {str(index): sampled(tensor, _SAMPLES) for index, tensor in enumerate(tensors)}
        pieces = [piece for tensor in tensors for piece in tensor.split(_PIECE)]
        return Persisting(
            name,
            layout,
            keys,
            stamp,
            samples,
            Sample(samples),
            [(piece, sums_of_bytes(piece)) for piece in pieces],
        )

    @property
    def key(self) -> Hashable:
        """Which weights they are: an engine keeps each image for good, so its address is a name."""
        return id(self.layout), self.keys

    def is_same(self, stamp: Writes) -> bool:
        """Tells whether the host still has these weights, as far as a look at each tensor says."""
        return stamp == self.stamp and not self._sampled.look(self._samples)()

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


class DeviceArena:
    """One range of device memory, allocated at its exact size, from which slots are cut.

    Views handed out before a new size keep the old memory alive and do not see the new one. So the size changes between
    runs only, and views that outlast a run are kept here, where they end with their memory.

    Attributes:
        before_loss: Called with an offset and bytes from there on, before their contents are lost.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._views: dict[Hashable, list[torch.Tensor]] = {}
        self._persisting: dict[tuple[int, int], Persisting] = {}
        # Of all frozen weights that were ever here: to read them anew takes longer than to copy them.
        self._remembered: dict[Hashable, Persisting] = {}
        self._buffer = self._none()
        self.before_loss: Callable[[int, int], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._buffer.numel()

    def resize(self, nbytes: int) -> None:
        """Gives the arena another size; its contents are lost."""
        # The old memory is freed first: both at once may not fit. If the new allocation fails, the arena is empty.
        self.release()
        self._buffer = self.device.allocate(nbytes)
        assert self._buffer.data_ptr() % self.device.alignment == 0

    def _none(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device.torch_device)

    def slot(self, offset: int, nbytes: int) -> torch.Tensor:
        """Returns the bytes `offset` (inclusive) to `offset + nbytes` (exclusive) as a `uint8` view.

        Each view has a version counter of its own: a prefetch into one slot must not look to autograd like a
        write into the weights of another.
        """
        assert 0 <= offset <= offset + nbytes <= self.nbytes, f"slot {offset}+{nbytes} is outside the arena"
        return self._buffer.data[offset : offset + nbytes]

    def kept_views(self, key: Hashable, make: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Returns views of the memory that were made once, until the memory is another."""
        if key not in self._views:
            self._views[key] = make()
        return self._views[key]

    def persisting(self, offset: int, nbytes: int) -> Persisting | None:
        """Returns what is known of the frozen weights that lie in these bytes."""
        return self._persisting.get((offset, nbytes))

    def write(self, offset: int, nbytes: int) -> torch.Tensor:
        """Returns `slot` to be filled: of frozen weights that lay there nothing is known any more."""
        if self.before_loss is not None:
            self.before_loss(offset, nbytes)
        for start, size in [(a, n) for a, n in self._persisting if a < offset + nbytes and offset < a + n]:
            del self._persisting[start, size]
        return self.slot(offset, nbytes)

    def persist(self, offset: int, nbytes: int, known: Persisting) -> None:
        """Notes which frozen weights lie in these bytes, once they are copied."""
        self._persisting[offset, nbytes] = self._remembered[known.key] = known

    def forget(self, key: Hashable) -> None:
        """Drops all that is known of some frozen weights: they have changed."""
        self._remembered.pop(key, None)
        self._persisting = {where: known for where, known in self._persisting.items() if known.key != key}

    def remembered(self, key: Hashable) -> Persisting | None:
        """Returns what was known last of some frozen weights, wherever they lay."""
        return self._remembered.get(key)

    def release(self) -> None:
        """Gives the memory back; the next `resize` allocates anew."""
        if self.before_loss is not None:
            self.before_loss(0, self.nbytes)
        self._views.clear()
        self._persisting.clear()
        self._buffer = self._none()


class Bring(Protocol):
    """What has a block that the device updates in the arena."""

    def __call__(self, layout: BlockImage, where: Bytes, /, *, stays: bool) -> None:
        """Brings weights and the optimizer's state; what is frozen of the weights `stays` if it is there."""


class Slots:
    """Fills slots from the host store and gives templates views of them, without a copy."""

    def __init__(
        self, images: Sequence[BlockImage], store: HostStore, arena: DeviceArena, program: Program, schedule: Table
    ):
        self._images = images
        self._program = program
        self._store, self._arena = store, arena
        self._places: dict[str, torch.Tensor] = {}
        self._at: int | None = None
        self._sampled: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]] | None = None
        self._frozen = {
            block: frozenset(k for k in program.blocks[block].binding if not program.state[k].requires_grad)
            for block in (*schedule.persistent, *schedule.device_updates)
        }
        self._num_uses = 0

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
            persists: Its frozen weights may be there from an earlier step.
        """
        if where is not None and persists:
            self._prefetch_changing(block, where)
        elif where is not None:
            self._store.prefetch(self._images[block], self._arena.write(*where))

    def _prefetch_changing(self, block: int, where: Bytes) -> None:
        """Copies the part of a block's state that changes from step to step, and the rest if it isn't there."""
        arena, layout = self._arena, self._images[block]
        if self._has_frozen(block, where):
            self._store.prefetch(layout, arena.slot(*where), without=self._frozen[block])
        else:
            self._store.prefetch(layout, arena.write(*where))
            self._note_frozen(block, where)

    def bring(self, block: int, where: Bytes, bring: Bring) -> None:
        """Has a block that the device updates in the arena; `bring` does that."""
        has_frozen = bool(self._frozen[block])
        bring(self._images[block], where, stays=not has_frozen or self._has_frozen(block, where))
        if has_frozen and self._arena.persisting(*where) is None:
            self._note_frozen(block, where)

    def _has_frozen(self, block: int, where: Bytes) -> bool:
        """Tells whether a block's frozen weights lie in these bytes as the host has them."""
        arena, layout, frozen = self._arena, self._images[block], self._frozen[block]
        stamp, known, key = self._store.stamp(layout, frozen), arena.persisting(*where), (id(layout), frozen)
        if known is None or stamp is None or known.key != key or not known.is_same(stamp):
            return False
        self._num_uses += 1
        # Each step checks a part of about one block, of another one each time.
        if self._num_uses % (len(self._frozen) + 1) == 0:
            try:
                known.check_next()
            except ExecuteError:
                arena.forget(key)
                raise
        return True

    def _note_frozen(self, block: int, where: Bytes) -> None:
        """Notes that a block's frozen weights lie in these bytes now."""
        arena, layout, frozen = self._arena, self._images[block], self._frozen[block]
        if (stamp := self._store.stamp(layout, frozen)) is None:
            return
        known = arena.remembered((id(layout), frozen))
        if known is None or not known.is_same(stamp):
            name, weights = self._program.blocks[block].name, self._store.bytes_of(layout, frozen)
            known = Persisting.of(name, layout, frozen, stamp, weights)
        arena.persist(*where, known)

    def state(self, block: int, where: Bytes | None) -> list[torch.Tensor]:
        """Returns a block's state as views of the arena, or of the host store where state is used in place."""
        layout, arena = self._images[block], self._arena
        if where is None:
            return self._store.bound(layout)
        # The engine keeps each image for good, so its address is a name.
        key = (id(layout), where.offset)
        return arena.kept_views(key, lambda: views(layout, arena.slot(*where)))
