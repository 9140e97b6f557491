"""The gradients of parameters: their sums over micro-batches and blocks, and where on the host they lie."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatrain.base.sizes import aligned
from megatrain.device.bus import Bus, GrowingArena
from megatrain.device.host_arena import HostArena, together
from megatrain.passes.program import Program
from megatrain.runtime.accumulation import Accumulation, Hear, ParameterGradient, Take, summed, whole_norms
from megatrain.scheduler.instructions import Bytes
from megatrain.tracer.block_image import BlockImage, image, views
from megatrain.tracer.inventory import StateEntry
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
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._rooms: dict[str, _Room] = {}
        self.slab = GrowingArena(bus)

    @property
    def nbytes(self) -> int:
        """Bytes of all rooms and the slab."""
        return self.slab.nbytes + sum(arena.nbytes for arena in {room.arena for room in self._rooms.values()})

    def reserve(self, specs: Mapping[str, TensorSpec]) -> None:
        """Makes rooms for gradients that have none."""
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

    def clear(self) -> None:
        """Lets go of all memory; gradients that somebody holds stay."""
        self._rooms.clear()
        self.slab.clear()


class GradientPlace(NamedTuple):
    """Where a gradient goes on the host.

    Args:
        tensor: None for new memory.
        arena: That it is in; None if it isn't memory for transfers.
        is_lent: Its memory takes the next block's gradients.
    """

    tensor: torch.Tensor | None = None
    arena: HostArena | None = None
    is_lent: bool = False


class Landed(NamedTuple):
    """A gradient on the host."""

    gradient: torch.Tensor | None
    is_lent: bool = False


Land = Callable[[int, Bytes | None, Sequence[Landed]], "Sequence[Landed] | None"]
"""Takes a block, where its gradients land, and the gradients there. Returns what is to be collected at once; None if
`GradientBuffer.collect` will get the gradients later."""


class StepPlaces:
    """Those of a training step: each block's gradients have a place, where they wait for their updates.

    Args:
        nbytes: Bytes of all of them; some may use the same bytes one after another.
        arena: Where they are, kept from step to step.
    """

    def __init__(self, nbytes: int, program: Program, arena: GrowingArena):
        self._arena = arena
        self._nbytes = nbytes
        self._layouts = block_layouts(program)
        self._memory: HostArena | None = None
        self._places: dict[int, dict[str, GradientPlace]] = {}

    def begin(self, keeps: Callable[[str], bool]) -> None:
        """Has all memory there before the backward; `keeps` tells who will keep the memory of its gradient."""
        memory = self._arena.ensure(self._nbytes)
        if memory is not self._memory:
            self._memory = memory
            self._places.clear()

    def of(
        self,
        block: int,
        where: Bytes | None,
        gradients: Mapping[str, torch.Tensor | None],
        stays: Callable[[str], bool],
    ) -> Mapping[str, GradientPlace] | None:
        """Returns the places of a block's gradients; None leaves them where they are made.

        Args:
            where: The bytes that the schedule has for them, the same each time.
            stays: Whether the memory of a gradient may be the taker's.
        """
        if where is None:
            return None
        if block not in self._places:
            assert self._memory is not None
            layout = self._layouts[block]
            found = views(layout, self._memory.tensor[where.offset : where.offset + layout.nbytes])
            self._places[block] = {
                e.key: GradientPlace(tensor, self._memory) for e, tensor in zip(layout.entries, found, strict=True)
            }
        return self._places[block]


class CallPlaces:
    """Those of a call: gradients that stay go to rooms of their own, all others through the slab."""

    def __init__(
        self,
        program: Program,
        trained: Sequence[str],
        parts: Sequence[StateEntry],
        memory: GradientMemory,
        slab_bytes: int,
    ):
        self._memory = memory
        self._slab_bytes = slab_bytes
        self._slab = HostArena(0)
        state = program.state
        owners = {part.owner for part in parts}
        self._specs: Mapping[str, TensorSpec] = {key: state[key].spec for key in trained if key not in owners}
        uses = Counter(key for block in program.blocks for key in block.binding)
        # Only the first of several terms can stay where it lands.
        self._has_sums = bool(owners) or any(uses[key] > 1 for key in self._specs)

    def begin(self, keeps: Callable[[str], bool]) -> None:
        """See `StepPlaces`."""
        kept = {key: spec for key, spec in self._specs.items() if keeps(key)}
        self._memory.reserve(kept)
        is_slab_used = self._has_sums or any(
            key not in kept or not self._memory.is_free(key, spec) for key, spec in self._specs.items()
        )
        self._slab = self._memory.slab.ensure(self._slab_bytes) if is_slab_used else HostArena(0)

    def of(
        self,
        block: int,
        where: Bytes | None,
        gradients: Mapping[str, torch.Tensor | None],
        stays: Callable[[str], bool],
    ) -> Mapping[str, GradientPlace] | None:
        """See `StepPlaces`; a gradient without an entry gets new memory."""
        found: dict[str, GradientPlace] = {}
        offset = 0
        for key, gradient in gradients.items():
            if gradient is None or gradient.layout != torch.strided:
                continue
            spec = self._specs.get(key)
            room = self._memory.room(key, spec) if spec is not None and stays(key) else None
            if room is not None:
                found[key] = GradientPlace(*room)
            elif offset + gradient.nbytes <= self._slab.nbytes:
                found[key] = GradientPlace(_flat(self._slab, offset, gradient), self._slab, is_lent=True)
                offset += aligned(gradient.nbytes)
        return found


def _flat(slab: HostArena, offset: int, gradient: torch.Tensor) -> torch.Tensor:
    """The bytes of a slab from `offset` on, as a contiguous tensor like a gradient."""
    return slab.tensor[offset : offset + gradient.nbytes].view(gradient.dtype).view(gradient.shape)


def _brought(bus: Bus, gradient: torch.Tensor | None, place: GradientPlace) -> torch.Tensor | None:
    """Issues the copy of a gradient to its place. Sparse ones, and those of another dtype, get new memory at once."""
    if gradient is None or (gradient.layout != torch.strided and bus.device.can_bind):
        return gradient
    tensor, arena = place.tensor, place.arena
    if tensor is None or arena is None or gradient.layout != torch.strided or tensor.dtype != gradient.dtype:
        return bus.device.to_host(gradient)
    return bus.to_host(tensor, gradient, arena)


def block_layouts(program: Program) -> list[BlockImage]:
    """The layout of each block's gradients: those of its trained state, each once."""
    state = program.state
    return [
        image([(key, state[key].spec) for key in dict.fromkeys(block.binding) if state[key].requires_grad])
        for block in program.blocks
    ]


class GradientBuffer:
    """Collects the gradients of one backward, and hands each parameter's on when it is whole.

    A parameter that several blocks use (tied, or a block called twice) gets one sum, in the order in which the
    blocks' gradients arrive, and is handed on once, with the last of them.

    Args:
        parts: Parts of parameters; the gradient of each becomes rows of the parameter's, whose other rows are zero.
        places: Where gradients go; None if they are made in host memory, and stay there.
    """

    def __init__(
        self,
        parameter_of: Callable[[str], torch.Tensor],
        bus: Bus,
        parts: Sequence[StateEntry] = (),
        *,
        places: StepPlaces | CallPlaces | None = None,
    ):
        self._parameter_of = parameter_of
        self._bus = bus
        self._parts = {part.key: part for part in parts}
        self._places = places
        self._reuses_places = True
        self._sums: dict[str, torch.Tensor] = {}
        # Of these sums the memory takes the next block's gradients.
        self._lent: set[str] = set()
        self._received: set[int] = set()
        # Of these nothing may follow: it would be lost.
        self._taken: set[str] = set()
        self._norms: dict[str, torch.Tensor] = {}
        self._accumulation = Accumulation(parameter_of)
        self.end()

    def begin(
        self,
        take: Take | None = None,
        handed: set[str] | None = None,
        *,
        land: Land | None = None,
        hear: Hear | None = None,
    ) -> None:
        """Starts a backward.

        Args:
            take: Gets the gradients; None adds them to `.grad`.
            handed: Keys of gradients that were handed on before, by a backward that this one repeats; extended.
            land: Gets what lands of each block first; None where nobody else has gradients of it.
            hear: Gets the norms of gradients that are whole as they leave the device; None if nobody asks.
        """
        self.end()
        self._reuses_places = True
        self._take = take or self._accumulation
        self._land_first, self._hear = land, hear
        self._keeps = getattr(self._take, "keeps", lambda _: True)
        self._handed = set[str]() if handed is None else handed
        if self._places is not None:
            self._places.begin(self._keeps)

    def end(self) -> None:
        """Lets go of who takes gradients, and of the sums of a backward that failed."""
        self._sums.clear()
        self._received.clear()
        self._taken.clear()
        self._take: Take = self._accumulation
        self._keeps: Callable[[str], bool] = self._accumulation.keeps
        self._land_first: Land | None = None
        self._hear: Hear | None = None
        self._norms.clear()
        self._handed: set[str] = set()

    def stop_reuse(self) -> None:
        """Lets all further gradients of this backward have new memory: updates don't keep up with them any more."""
        self._reuses_places = False

    def receive(
        self,
        block: int,
        keys: Sequence[str],
        gradients: Sequence[ParameterGradient],
        completes: Collection[str],
        where: Bytes | None,
    ) -> None:
        """Takes one block's gradients. If a hook on a parameter fails, the same block may come again.

        Args:
            keys: Parameters, in the order of `gradients`.
            completes: Keys whose sum is complete with this block.
            where: Where the gradients land on the host; None if they stay where they are made, to be adopted there.
        """
        landed: Sequence[Landed] | None = None
        if block not in self._received:
            partial = {*self._parts, *self._sums}
            norms = None if self._hear is None else whole_norms(keys, gradients, set(completes) - partial)
            landed = self._land(block, keys, gradients, where)
            if norms is not None:
                self._norms.update(zip(norms[0], self._bus.device.to_host(norms[1]), strict=True))
            if self._land_first is not None and (landed := self._land_first(block, where, landed)) is None:
                return
        self.collect(block, keys, landed, completes)

    def take_norms(
        self,
        keys: Sequence[str],
        gradients: Sequence[ParameterGradient],
        completes: Sequence[str],
        take: Callable[[str, torch.Tensor, torch.Tensor | None], None],
    ) -> None:
        """Takes the norms of one block's whole gradients, which stay on the device.

        Args:
            keys: Parameters, in the order of `gradients`.
            completes: Those that are trained, in the order in which others take them.
            take: Gets each key and gradient, and the norm on the host; None of a gradient that isn't dense.
        """
        normed, norms = whole_norms(keys, gradients, completes) or ((), torch.empty(0))
        known = dict(zip(normed, self._bus.device.to_host(norms), strict=True))
        found = {key: gradient for key, (gradient, _) in zip(keys, gradients, strict=True)}
        for key in completes:
            if (gradient := found[key]) is not None:
                take(key, gradient, known.get(key))

    def collect(
        self, block: int, keys: Sequence[str], landed: Sequence[Landed] | None, completes: Collection[str]
    ) -> None:
        """Takes one block's gradients, where they are: the second half of `receive`, or what follows a `Land`.

        Args:
            landed: The gradients; None if the block came before.
        """
        if block not in self._received:
            assert landed is not None
            self._add(keys, landed, completes)
            self._received.add(block)
        for key in completes:
            total = self._sums.get(key)
            if total is None:
                continue
            if key in self._lent and self._keeps(key):
                total = self._sums[key] = total.clone()
                self._lent.remove(key)
            if key in self._parts:
                self._fill_rows(self._parts[key], total)
            elif key not in self._handed:
                if self._hear is not None and key in self._norms:
                    self._hear(key, self._norms.pop(key))
                self._take(key, total)
                self._handed.add(key)
            del self._sums[key]
            self._taken.add(key)

    def _land(
        self, block: int, keys: Sequence[str], gradients: Sequence[ParameterGradient], where: Bytes | None
    ) -> Sequence[Landed]:
        """Brings a block's gradients to the host, and waits for them; each with whether its memory is lent."""
        places = None
        if self._places is not None and self._reuses_places:
            tensors = {key: gradient for key, (gradient, _) in zip(keys, gradients, strict=True)}
            if len(tensors) == len(keys):  # else two gradients of one key would have one place
                places = self._places.of(block, where, tensors, self._stays)
        if places is None:
            return self._as_made(gradients, is_elsewhere=where is not None)
        landed = [
            Landed(_brought(self._bus, gradient, place), place.is_lent)
            for key, (gradient, _) in zip(keys, gradients, strict=True)
            for place in (places.get(key, GradientPlace()),)
        ]
        self._bus.device.synchronize()
        return landed

    def _as_made(self, gradients: Sequence[ParameterGradient], *, is_elsewhere: bool) -> list[Landed]:
        """Gradients in new memory; or those that are made on the host, if nothing else uses their memory."""
        if not self._bus.device.can_bind:
            return [
                Landed(None if gradient is None else self._bus.device.to_host(gradient)) for gradient, _ in gradients
            ]
        seen: set[int] = set()
        landed: list[Landed] = []
        for gradient, is_shared in gradients:
            if gradient is None or gradient.layout != torch.strided:
                landed.append(Landed(gradient))
                continue
            storage = gradient.untyped_storage()
            is_own = not is_shared and storage.data_ptr() not in seen and storage.nbytes() == gradient.nbytes
            seen.add(storage.data_ptr())
            landed.append(Landed(gradient if is_own and not is_elsewhere else gradient.clone()))
        return landed

    def _add(self, keys: Sequence[str], landed: Sequence[Landed], completes: Collection[str]) -> None:
        """Adds gradients to the sums, in place where that gives the same; if it fails, none is added."""
        made: dict[str, torch.Tensor] = {}
        assert self._taken.isdisjoint(k for k, (found, _) in zip(keys, landed, strict=True) if found is not None)
        in_place: list[tuple[torch.Tensor, torch.Tensor]] = []
        lent: set[str] = set()
        for key, (gradient, is_lent) in zip(keys, landed, strict=True):
            if gradient is None:
                continue
            total = made.get(key, self._sums.get(key))
            if total is None:
                # What is lent lasts until this block's sums are taken.
                is_last = key in completes
                made[key] = gradient.clone() if is_lent and not is_last else gradient
                lent.update([key] if is_lent and is_last else [])
            elif total.layout == gradient.layout == torch.strided and total.dtype == gradient.dtype:
                in_place.append((total, gradient))
            else:
                made[key] = summed(total, gradient)
        self._lent = lent
        for total, gradient in in_place:
            total.add_(gradient)
        self._sums.update(made)

    def _fill_rows(self, part: StateEntry, gradient: torch.Tensor) -> None:
        """Puts a part's gradient into the whole, which counts as one once all its parts are complete."""
        whole = self._sums.get(part.owner)
        if whole is None:
            parameter = self._parameter_of(part.owner)
            whole = self._sums[part.owner] = torch.zeros(parameter.shape, dtype=parameter.dtype)
        start, end = part.rows
        whole[start:end] = gradient.to_dense() if gradient.layout != torch.strided else gradient

    def _stays(self, key: str) -> bool:
        """Whether a gradient may stay where it lands: it is kept, and neither a part nor added to others."""
        return key not in self._parts and key not in self._sums and self._keeps(key)
