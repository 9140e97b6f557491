"""Homes: where each tensor of the model's state lies on the host, and which of them cross in one copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

import torch

from megatrain.errors import ExecuteError
from megatrain.memory.block_image import Entry
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


@dataclass(slots=True, eq=False)
class Home:
    """The home of a key: the user's tensor, and the view of the arena that it uses.

    `memory` is another number whenever the values come from another memory. `sent` is where the same values can be
    copied to the device from; None for the arena itself.
    """

    key: str
    spec: TensorSpec
    arena: HostArena
    offset: int
    tensor: torch.Tensor
    view: torch.Tensor
    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    memory: int = field(default_factory=new_memory)
    sent: Sent | None = None

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


def take_in(home: Home) -> None:
    """Copies values that the user gave new memory, and has the tensor use its home again.

    Raises:
        ExecuteError: If shape, dtype or device changed.
    """
    tensor, view = home.tensor, home.view
    if tensor.shape != view.shape or tensor.dtype != view.dtype or tensor.device != view.device:
        now = f"{TensorSpec.of(tensor)} on {tensor.device}"
        raise ExecuteError(
            f"`{home.key}` became {now}; the compiled model holds {home.spec} on {view.device}.\n"
            "  Shape, dtype and device of the state are fixed when the model is compiled.\n"
            "  Module.to, .cuda() and .half() change them; a trainer that moves its model calls these.\n"
            "  Change them first, then compile; or give such a trainer the compiled model, which stays in place."
        )
    # Cloned, because the new value may be another view of the very same memory (`p.data = p.data.t()`).
    view.copy_(tensor.detach().clone())
    tensor.data = view
    home.memory = new_memory()


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
