"""Homes: where each tensor of the model's state lies on the host, and which of them cross in one copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch.autograd.graph import increment_version

from megatrain.base.sizes import aligned
from megatrain.device.host_arena import HostArena, plain_view
from megatrain.device.unshared import IN_PLACE, PARTED, held_elsewhere, warn_of_holders
from megatrain.errors import ExecuteError
from megatrain.tracer.block_image import Entry, image, stored_stride, views
from megatrain.tracer.spec import TensorSpec

_memories = count()


def new_memory() -> int:
    """A number that no memory had before."""
    return next(_memories)


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """Page-locked memory that the ranks of a host share, from which a tensor is copied to the device.

    Args:
        offset: The tensor's first byte there.
        is_stale: Tells whether this rank's user has written other values, in memory that isn't page-locked.
    """

    arena: HostArena
    offset: int
    is_stale: Callable[[], bool]


@dataclass(frozen=True, slots=True, eq=False)
class StorePlace:
    """A place of the store's own for the values of one tensor.

    The user's tensor gets a storage of its own over these bytes, so that the store knows when nobody holds it any more.

    Args:
        view: The tensor there, for the store alone.
        lent: Returns None when nobody holds the storage that the user's tensor got, in whatever form, or it got none.
    """

    arena: HostArena
    offset: int
    view: torch.Tensor
    lent: Callable[[], object] = lambda: None

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in the storage that was lent."""
        return self.lent() is not None and tensor.untyped_storage().data_ptr() == self.view.data_ptr()

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in that storage, and laid out as the store wants."""
        return self.is_of(tensor) and (tensor.data_ptr(), tensor.stride()) == (self.view.data_ptr(), self.view.stride())


def lend(key: str, spec: TensorSpec, arena: HostArena, offset: int) -> tuple[StorePlace, torch.Tensor]:
    """Returns a place in an arena, and a tensor there for the user."""
    layout, end = image([(key, spec)]), offset + spec.nbytes
    (view,) = views(layout, arena.part(offset, end))  # the view is the same as in any block
    memory, lent = arena.lent_part(offset, end)
    (given,) = views(layout, memory)
    return StorePlace(arena, offset, view, lent), given


@dataclass(slots=True, eq=False)
class Residency:
    """The residency of a key: the user's tensor, and a view of the memory that this tensor names.

    `memory` is another number whenever the values come from another memory. `sent` is where the same values can be
    copied to the device from; None for the arena itself. `places` are those of the store's own that the tensor had, the
    latest first: the others are somebody's who held the tensor's earlier memory, or free while the tensor is in memory
    that the user gave to it and somebody else holds.
    """

    key: str
    spec: TensorSpec
    arena: HostArena
    offset: int
    tensor: torch.Tensor
    view: torch.Tensor
    places: list[StorePlace]
    memory: int = field(default_factory=new_memory)
    sent: Sent | None = None
    address: int = field(init=False)
    shape: torch.Size = field(init=False)
    stride: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.address, self.shape, self.stride = self.view.data_ptr(), self.view.shape, self.view.stride()

    def use(self, arena: HostArena, offset: int, view: torch.Tensor, sent: Sent | None = None) -> None:
        """Goes to other memory; a backward that is still to come sees that its weights aren't there any more."""
        if view is not self.view:
            increment_version(self.view)
        self.arena, self.offset, self.view, self.address = arena, offset, view, view.data_ptr()
        self.memory, self.sent = new_memory(), sent

    @property
    def has_changed(self) -> bool:
        """Whether the user's tensor has other memory, or another layout, than this view."""
        tensor = self.tensor
        return (
            tensor.data_ptr() != self.address
            or tensor.stride() != self.stride
            or tensor.shape != self.shape
            or tensor.dtype != self.view.dtype
        )

    def replace(self, tensor: torch.Tensor) -> None:
        """Goes on with another tensor. The place of the earlier one is free then, unless others hold it as well."""
        # The user may put the earlier tensor back.
        if any(place.is_of(self.tensor) for place in self.places) and not held_elsewhere({self.key: self.tensor}):
            self.tensor.data = self.tensor.detach().clone()
        self.tensor, self.memory = tensor, new_memory()

    def check_alike(self) -> None:
        """Checks that the user's tensor is what the model was compiled for."""
        tensor, view = self.tensor, self.view
        if tensor.shape == view.shape and tensor.dtype == view.dtype and tensor.device == view.device:
            return
        now = f"{TensorSpec.of(tensor)} on {tensor.device}"
        raise ExecuteError(
            f"`{self.key}` became {now}; the compiled model holds {self.spec} on {view.device}.\n"
            "  Shape, dtype and device of the state are fixed when the model is compiled.\n"
            "  Module.to, .cuda() and .half() change them; a trainer that moves its model calls these.\n"
            "  Change them first, then compile; or give such a trainer the compiled model, which stays in place."
        )

    def place(self, *, own: bool) -> tuple[HostArena, int]:
        """The arena and the offset from which it is copied: what the user sees, or what ranks share where they do."""
        return (self.arena, self.offset) if own or self.sent is None else (self.sent.arena, self.sent.offset)


@dataclass(frozen=True, slots=True)
class OneCopy:
    """Bytes with the same layout in the arena and in a slot: one copy."""

    start: int
    end: int
    source: torch.Tensor
    arena: HostArena


def residency_of(entry: Entry, residencies: Mapping[str, Residency]) -> Residency:
    """Returns the residency of an entry; a part is inside its whole, which is placed, moved and refreshed as one."""
    residency = residencies[entry.owner]
    if entry.base is None:
        return residency
    view = residency.view.narrow(0, entry.first_row, entry.spec.shape[0])
    start = view.data_ptr() - residency.view.data_ptr()
    sent = None if residency.sent is None else replace(residency.sent, offset=residency.sent.offset + start)
    return replace(residency, key=entry.key, spec=entry.spec, offset=residency.offset + start, view=view, sent=sent)


def in_place(tensor: torch.Tensor) -> tuple[HostArena, torch.Tensor]:
    """Returns an arena over a tensor's own memory, and the tensor there."""
    return HostArena.borrowed(tensor), plain_view(tensor, tensor.dtype, tensor.shape, tensor.stride())


def staying(
    tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec], *, is_slow: bool = False
) -> list[str]:
    """Finds the state that must stay where it is, because somebody else holds this memory as well.

    Args:
        specs: Theirs in the store; what is laid out in another way can't stay.
        is_slow: Warn that copies to the device are slower from there.
    """
    found = held_elsewhere(tensors)
    stay = [key for key in found if tensors[key].stride() == stored_stride(specs[key])]
    warn_of_holders(stay if is_slow else [], *IN_PLACE)
    warn_of_holders(
        [key for key in found if key not in set(stay)],
        PARTED,
        "The store has no gaps between elements. Take a contiguous tensor, or drop the other before the next call.",
    )
    return stay


def take_in(changed: Sequence[Residency]) -> list[HostArena]:
    """Goes on with the memory that the user gave to tensors, or copies its values into memory of the store.

    Nothing is ever written that somebody else may hold. Memory that the tensor alone names is copied, and so freed.

    Raises:
        ExecuteError: If shape, dtype or device changed, before anything is taken in.
    """
    for residency in changed:
        residency.check_alike()
    known = {residency.key: place for residency in changed for place in residency.places if place.has(residency.tensor)}
    others = [residency for residency in changed if residency.key not in known]
    stay = set(
        staying(
            {residency.key: residency.tensor for residency in others},
            {residency.key: residency.spec for residency in others},
        )
    )
    arenas: list[HostArena] = []
    for residency in changed:
        if residency.key in stay:
            arena, view = in_place(residency.tensor)
            residency.use(arena, 0, view)
            arenas.append(arena)
            continue
        place = known.get(residency.key) or _copied_in(residency)
        arenas.append(place.arena)
        residency.use(place.arena, place.offset, place.view)
        residency.places = [place, *(p for p in residency.places if p is not place and p.lent() is not None)]
    return arenas


def _copied_in(residency: Residency) -> StorePlace:
    """Copies the values of a tensor into a place that nobody else holds."""
    tensor = residency.tensor
    values = tensor.detach()
    free = next((place for place in residency.places if place.lent() is None), None)
    mine = next((place for place in residency.places if place.is_of(tensor)), None)
    if free is None and mine is not None and not held_elsewhere({residency.key: tensor}):
        free, values = mine, values.clone()  # another view of the very same memory (`p.data = p.data.t()`)
    if free is not None:
        residency.places.remove(free)
    arena, offset = (HostArena(residency.spec.nbytes), 0) if free is None else (free.arena, free.offset)
    place, given = lend(residency.key, residency.spec, arena, offset)
    place.view.copy_(values)
    tensor.data = given
    return place


def copies_of(
    entries: Iterable[Entry], residencies: Iterable[Residency], alignment: int, *, own: bool = False
) -> Iterable[OneCopy]:
    """Joins neighbours that have the same distance in the arena as in the image; for `own` see `Residency.place`."""
    start = end = source = 0
    arena: HostArena | None = None
    for entry, residency in zip(entries, residencies, strict=True):
        if not entry.spec.nbytes:
            continue
        is_next = entry.offset <= aligned(end, alignment)
        found, offset = residency.place(own=own)
        if arena is not found or offset - entry.offset != source - start or not is_next:
            if arena is not None:
                yield OneCopy(start, end, arena.tensor[source : source + end - start], arena)
            arena, start, source = found, entry.offset, offset
        end = entry.offset + entry.spec.nbytes
    if arena is not None:
        yield OneCopy(start, end, arena.tensor[source : source + end - start], arena)
