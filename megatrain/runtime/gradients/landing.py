"""Landing: where the gradients of a backward arrive on the host, those of a block in one burst."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatrain.memory.block_image import BlockImage, image, views
from megatrain.memory.bus import Bus
from megatrain.memory.host_arena import HostArena, together
from megatrain.passes.program import Program
from megatrain.runtime.gradients.flow import Facts
from megatrain.scheduler.instructions import Bytes
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


class Landed(NamedTuple):
    """A gradient on the host.

    Args:
        gradient: None where nothing flowed.
        is_lent: Its memory takes the next block's gradients.
    """

    gradient: torch.Tensor | None
    is_lent: bool = False


Land = Callable[[int, Bytes | None, Sequence[Landed]], "Sequence[Landed] | None"]
"""Takes a block, where its gradients land, and the gradients there. Returns what is to be collected at once; None if
`GradientSink.collect` will get the gradients later."""


class LandingArena:
    """The memory where gradients of training steps wait, kept from step to step; grows if a later schedule needs more.

    Args:
        bus: Brings gradients to the host.
    """

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.memory = HostArena(0)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.memory.nbytes

    def ensure(self, nbytes: int) -> HostArena:
        """Returns the memory, at least `nbytes`; other memory than before if it had to grow.

        Raises:
            ExecuteError: If the host can't give it.
        """
        if nbytes > self.memory.nbytes:
            self.memory = self.bus.arena(nbytes)
        return self.memory


class Landing:
    """The gradients of a training step: each block's have a place, where they wait for their updates.

    Args:
        nbytes: Bytes of all of them; some may use the same bytes one after another.
        program: What runs.
        arena: Where they are.
    """

    def __init__(self, nbytes: int, program: Program, arena: LandingArena):
        self._arena = arena
        self._nbytes = nbytes
        self._layouts = block_layouts(program)
        self._keys = [block.binding for block in program.blocks]
        self._memory: HostArena | None = None
        self._places: dict[int, list[torch.Tensor | None]] = {}

    def begin(self) -> None:
        """Has the memory there before the step begins.

        Raises:
            ExecuteError: See `LandingArena.ensure`.
        """
        memory = self._arena.ensure(self._nbytes)
        if memory is not self._memory:
            self._memory = memory
            self._places.clear()

    def land(self, block: int, where: Bytes, gradients: Sequence[torch.Tensor | None]) -> list[Landed]:
        """Copies a block's gradients to their places.

        Args:
            block: Whose gradients.
            where: The bytes of its places, the same each time.
            gradients: Of the block's state, in its order.
        """
        bus, places = self._arena.bus, self.places(block, where)
        found = [Landed(_brought(bus, g, place, self._memory)) for place, g in zip(places, gradients, strict=True)]
        bus.device.synchronize()
        return found

    def places(self, block: int, where: Bytes) -> Sequence[torch.Tensor | None]:
        """Returns where the gradients of a block's state go, in its order; None for what isn't trained."""
        assert self._memory is not None
        if block not in self._places:
            layout = self._layouts[block]
            found = views(layout, self._memory.tensor[where.offset : where.offset + layout.nbytes])
            by_key = {entry.key: tensor for entry, tensor in zip(layout.entries, found, strict=True)}
            self._places[block] = [by_key.get(key) for key in self._keys[block]]
        return self._places[block]


class PlainLanding:
    """The gradients of a call: those that stay go to rooms of their own, all others through the slab.

    Args:
        program: What runs.
        facts: Where gradients flow in it.
        memory: Has the rooms and the slab.
        bus: Brings gradients to the host.
        slab_bytes: The largest block's gradients.
    """

    def __init__(self, program: Program, facts: Facts, memory: GradientMemory, bus: Bus, slab_bytes: int):
        self._memory = memory
        self._bus = bus
        self._slab_bytes = slab_bytes
        self._slab = HostArena(0)
        state = program.state
        owners = {part.owner for part in facts.parts}
        self._specs: Mapping[str, TensorSpec] = {key: state[key].spec for key in facts.trained if key not in owners}
        uses = Counter(key for block in program.blocks for key in block.binding)
        # Only the first of several terms can stay where it lands.
        self._has_sums = bool(owners) or any(uses[key] > 1 for key in self._specs)

    def begin(self, keeps: Callable[[str], bool]) -> None:
        """Has all memory there before the backward begins.

        Args:
            keeps: Whether somebody will keep the memory of a parameter's gradient.

        Raises:
            ExecuteError: If the host can't give it.
        """
        kept = {key: spec for key, spec in self._specs.items() if keeps(key)}
        self._memory.reserve(kept)
        is_slab_used = self._has_sums or any(
            key not in kept or not self._memory.is_free(key, spec) for key, spec in self._specs.items()
        )
        self._slab = self._memory.slab(self._slab_bytes) if is_slab_used else HostArena(0)

    def land(
        self, keys: Sequence[str], gradients: Sequence[torch.Tensor | None], stays: Callable[[str], bool]
    ) -> list[Landed]:
        """Copies a block's gradients to the host.

        Args:
            keys: Of the parameters, in the order of `gradients`.
            gradients: Of the block's state.
            stays: Whether a gradient may stay where it lands.
        """
        found: list[Landed] = []
        offset = 0
        for key, gradient in zip(keys, gradients, strict=True):
            spec, place, arena, is_lent = self._specs.get(key), None, None, False
            if gradient is not None and gradient.layout == torch.strided:
                if spec is not None and stays(key):
                    place, arena = self._memory.room(key, spec) or (None, None)
                if place is None and offset + gradient.nbytes <= self._slab.nbytes:
                    place, arena, is_lent = _flat(self._slab, offset, gradient), self._slab, True
                    offset += aligned(gradient.nbytes)
            found.append(Landed(_brought(self._bus, gradient, place, arena), is_lent))
        self._bus.device.synchronize()
        return found


def _flat(slab: HostArena, offset: int, gradient: torch.Tensor) -> torch.Tensor:
    """The bytes of a slab from `offset` on, as a contiguous tensor like a gradient."""
    return slab.tensor[offset : offset + gradient.nbytes].view(gradient.dtype).view(gradient.shape)


def _brought(
    bus: Bus, gradient: torch.Tensor | None, place: torch.Tensor | None, arena: HostArena | None
) -> torch.Tensor | None:
    """Issues the copy of a gradient to its place. Sparse ones, and those of another dtype, get new memory at once."""
    if gradient is None or (gradient.layout != torch.strided and bus.device.can_bind):
        return gradient
    if place is None or arena is None or gradient.layout != torch.strided or place.dtype != gradient.dtype:
        return bus.device.to_host(gradient)
    return bus.to_host(place, gradient, arena)


def block_layouts(program: Program) -> list[BlockImage]:
    """The layout of each block's gradients: those of its trained state, each once."""
    state = program.state
    return [
        image([(key, state[key].spec) for key in dict.fromkeys(block.binding) if state[key].requires_grad])
        for block in program.blocks
    ]
