"""GradientMemory: where gradients of plain calls land on the host; most stay there, as `.grad`."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.memory.block_image import image, views
from megatrain.memory.bus import Bus
from megatrain.memory.host_arena import HostArena, together
from megatrain.sizes import aligned
from megatrain.tracer.spec import TensorSpec


@dataclass(slots=True, eq=False)
class _Room:
    spec: TensorSpec
    arena: HostArena
    offset: int
    holder: weakref.ref[Any] | None = None


class GradientMemory:
    """A room for the gradient of each parameter, and a slab for gradients that don't stay where they land.

    The memory is made once, and page-locked where transfers gain from that. A room is given out as a tensor with a
    storage of its own, and again when nobody holds that storage any more: a gradient that the user keeps is never
    overwritten.

    Args:
        bus: Brings gradients to the host.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._rooms: dict[str, _Room] = {}
        self._slab = HostArena(0)

    @property
    def nbytes(self) -> int:
        """Bytes of all rooms and the slab."""
        return self._slab.nbytes + sum(arena.nbytes for arena in {room.arena for room in self._rooms.values()})

    def reserve(self, specs: Mapping[str, TensorSpec]) -> None:
        """Makes rooms for gradients that have none.

        Args:
            specs: Of the parameters, by key.

        Raises:
            ExecuteError: If the host can't give the memory.
        """
        fresh = {key: spec for key, spec in specs.items() if not self._has_room(key, spec)}
        keys, sizes = list(fresh), [aligned(spec.nbytes) for spec in fresh.values()]
        for group in together(sizes, self._bus.device.lock_bytes):
            arena, offset = self._bus.arena(sum(sizes[index] for index in group)), 0
            for index in group:
                self._rooms[keys[index]] = _Room(fresh[keys[index]], arena, offset)
                offset += sizes[index]

    def _has_room(self, key: str, spec: TensorSpec) -> bool:
        return key in self._rooms and self._rooms[key].spec == spec

    def is_free(self, key: str, spec: TensorSpec) -> bool:
        """Tells whether there is a room for a gradient that nobody holds."""
        holder = self._rooms[key].holder if self._has_room(key, spec) else None
        return self._has_room(key, spec) and (holder is None or holder() is None)

    def room(self, key: str, spec: TensorSpec) -> tuple[torch.Tensor, HostArena] | None:
        """Returns the room of a gradient, and the arena that it is in; None if somebody holds it, or there is none."""
        if not self.is_free(key, spec):
            return None
        room = self._rooms[key]
        memory, room.holder = room.arena.lent_part(room.offset, room.offset + spec.nbytes)
        (tensor,) = views(image([(key, spec)]), memory)
        return tensor.data, room.arena  # what autograd takes for a view has rules of its own

    def slab(self, nbytes: int) -> HostArena:
        """Returns memory of at least `nbytes`, the same each time unless it has to grow.

        Raises:
            ExecuteError: If the host can't give it.
        """
        if nbytes > self._slab.nbytes:
            self._slab = HostArena(0)  # the old one goes first
            self._slab = self._bus.arena(nbytes)
        return self._slab

    def clear(self) -> None:
        """Lets go of all memory; gradients that somebody holds stay."""
        self._rooms.clear()
        self._slab = HostArena(0)
