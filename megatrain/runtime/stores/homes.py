"""Homes: where each tensor of the model's state lies on the host, and which of them cross in one copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

import torch
from torch.autograd.graph import increment_version

from megatrain.errors import ExecuteError
from megatrain.memory.block_image import Entry, image, views
from megatrain.memory.host_arena import HostArena
from megatrain.sizes import Section, aligned
from megatrain.tracer.spec import TensorSpec

_memories = count()


def new_memory() -> int:
    """A number that no memory had before."""
    return next(_memories)


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """Page-locked memory that the ranks of a host share, from which a tensor is copied to the device.

    Args:
        arena: The memory.
        offset: The tensor's first byte there.
        is_stale: Tells whether this rank's user has written other values, in memory that isn't page-locked.
    """

    arena: HostArena
    offset: int
    is_stale: Callable[[], bool]


@dataclass(frozen=True, slots=True, eq=False)
class NewMemory:
    """Other memory for a tensor of state, which has its values.

    Args:
        arena: An arena.
        offset: The tensor's first byte there.
        view: The tensor there, as a view of its own storage.
        sent: Where copies to the device come from; None for the arena.
    """

    arena: HostArena
    offset: int
    view: torch.Tensor
    sent: Sent | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A place of the store's own for the values of one tensor.

    The user's tensor gets a storage of its own over these bytes, so that the store knows when nobody holds it any more.

    Args:
        arena: An arena.
        offset: The tensor's first byte there.
        view: The tensor there, for the store alone.
        lent: Returns None when nobody holds the storage that the user's tensor got, in whatever form.
    """

    arena: HostArena
    offset: int
    view: torch.Tensor
    lent: Callable[[], object]

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in the storage that was lent."""
        return self.lent() is not None and tensor.untyped_storage().data_ptr() == self.view.data_ptr()

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in that storage, and laid out as the store wants."""
        return self.is_of(tensor) and (tensor.data_ptr(), tensor.stride()) == (self.view.data_ptr(), self.view.stride())


def lend(key: str, spec: TensorSpec, arena: HostArena, offset: int) -> tuple[Place, torch.Tensor]:
    """Returns a place in an arena, and a tensor there for the user."""
    layout, end = image([(key, spec)]), offset + spec.nbytes
    (view,) = views(layout, arena.part(offset, end))  # the view is the same as in any block
    memory, lent = arena.lent_part(offset, end)
    (given,) = views(layout, memory)
    return Place(arena, offset, view, lent), given


@dataclass(slots=True, eq=False)
class Home:
    """The home of a key: the user's tensor, and a view of the memory that this tensor names.

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
    places: list[Place]
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

    def check_alike(self) -> None:
        """Checks that the user's tensor is what the model was compiled for.

        Raises:
            ExecuteError: If shape, dtype or device changed.
        """
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


def copies_of(
    entries: Iterable[Entry], homes: Iterable[Home], alignment: int, *, own: bool = False
) -> Iterable[OneCopy]:
    """Joins neighbours that have the same distance in the arena as in the image; for `own` see `Home.place`."""
    start = end = source = 0
    arena: HostArena | None = None
    for entry, home in zip(entries, homes, strict=True):
        if not entry.spec.nbytes:
            continue
        is_next = entry.offset <= aligned(end, alignment)
        found, offset = home.place(own=own)
        if arena is not found or offset - entry.offset != source - start or not is_next:
            if arena is not None:
                yield OneCopy(start, end, arena.tensor[source : source + end - start], arena)
            arena, start, source = found, entry.offset, offset
        end = entry.offset + entry.spec.nbytes
    if arena is not None:
        yield OneCopy(start, end, arena.tensor[source : source + end - start], arena)


def section_of(entry: Entry, home: Home, section: Section, *, own: bool = False) -> OneCopy:
    """A section of one tensor, in the order of its memory; for `own` see `Home.place`."""
    start, stop = (edge * entry.spec.dtype.itemsize for edge in section.of(entry.spec.numel))
    arena, offset = home.place(own=own)
    return OneCopy(entry.offset + start, entry.offset + stop, arena.tensor[offset + start : offset + stop], arena)
