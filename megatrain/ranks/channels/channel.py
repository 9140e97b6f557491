"""Channels: how the tensors of one block go from one rank to others, through rooms of host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from megatrain.memory.block_image import image, views
from megatrain.memory.host_arena import HostArena
from megatrain.ranks.channels.room_pieces import Piece, pieces
from megatrain.tracer.spec import TensorSpec

GoOn = Callable[[], object]
"""Called now and then while a transfer waits; raises an error to give it up."""


def _at_once(num_groups: int) -> None:
    """Of a room that goes as a whole."""


@dataclass(slots=True, eq=False)
class Room:
    """Host memory for the tensors of one block.

    Attributes:
        arena: The memory; who copies between it and a device page-locks it first.
        tensors: Contiguous ones, of the shapes and dtypes that were asked for.
        groups: The pieces of these tensors, in the order in which they go.
        present: Which tensors there are: said by who gives, known to who takes.
        hand_over: Called by who gives, once `present` is said, with the number of groups that are filled so far.
        wait: Called by who takes, with the number of groups that must be there when it returns.
        kept: The tensors as this rank may keep and change them, until the next ones of the same block come; None if
            the room is used again before.
    """

    arena: HostArena
    tensors: Sequence[torch.Tensor]
    groups: list[list[Piece]]
    present: list[bool] = field(default_factory=list[bool])
    hand_over: Callable[[int], None] = _at_once
    wait: Callable[[int], None] = _at_once
    kept: Sequence[torch.Tensor] | None = None

    def wait_for_all(self) -> None:
        """Returns once all of it is there."""
        self.wait(len(self.groups))

    @staticmethod
    def of(arena: HostArena, specs: Sequence[TensorSpec], start: int = 0) -> Room:
        """A room in an arena, from a byte on."""
        nbytes = room_bytes(specs)
        layout = image([(str(number), _plain(spec)) for number, spec in enumerate(specs)])
        return Room(arena, views(layout, arena.tensor[start : start + nbytes]), pieces(specs))


def room_bytes(specs: Sequence[TensorSpec]) -> int:
    """Bytes of a room for tensors of these shapes and dtypes."""
    return image([(str(number), _plain(spec)) for number, spec in enumerate(specs)]).nbytes


def _plain(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.shape, spec.dtype)


class Channel(ABC):
    """The way from one rank to one or more others. All its ends give and take for the same blocks in the same order.

    Attributes:
        blocks: Of each block its tensors, on all ends the same.
    """

    blocks: Sequence[Sequence[TensorSpec]] = ()

    def expect(self, blocks: Sequence[Sequence[TensorSpec]]) -> None:
        """Makes rooms large enough for each block; all ends call it for the same blocks, when nothing is under way."""
        self.blocks = blocks

    @abstractmethod
    def give(self, block: int, go_on: GoOn) -> AbstractContextManager[Room]:
        """A room to be filled in the body; what is in it then goes to the others, or before, as `hand_over` is called.

        Args:
            block: Whose tensors.
            go_on: See `GoOn`.

        Raises:
            RanksError: If another rank can't go on.
        """

    @abstractmethod
    def take(self, block: int, go_on: GoOn) -> AbstractContextManager[Room]:
        """A room with what comes, for the time of the body, which waits for what it reads. For the rest see `give`."""
