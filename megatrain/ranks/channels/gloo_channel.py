"""GlooChannel: a channel between ranks of different hosts, through collectives of Gloo."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch

from megatrain.memory.host_arena import HostArena
from megatrain.ranks.channels.channel import Channel, GoOn, Room, room_bytes
from megatrain.sizes import aligned
from megatrain.tracer.spec import TensorSpec

Send = Callable[[torch.Tensor, GoOn], None]
"""Gives bytes to all ranks of a group, or gets them; returns when that is over."""


class GlooChannel(Channel):
    """A channel in which each group of a room is a broadcast: asynchronous, so that its end can be given up.

    The first one also says which tensors there are. Groups without any of them aren't sent.

    Args:
        send: See `Send`.
    """

    def __init__(self, send: Send):
        self._send = send
        self._memory = HostArena(0)

    @contextmanager
    def give(self, block: int, go_on: GoOn) -> Generator[Room]:
        """See `Channel`."""
        room, flags = self._room(self.blocks[block])
        sent = 0

        def hand_over(num_groups: int) -> None:
            nonlocal sent
            flags.copy_(torch.tensor(room.present, dtype=torch.uint8))
            for number in range(sent, num_groups):
                self._transfer(room, number, go_on)
            sent = max(sent, num_groups)

        room.hand_over = hand_over
        yield room
        hand_over(max(1, len(room.groups)))

    @contextmanager
    def take(self, block: int, go_on: GoOn) -> Generator[Room]:
        """See `Channel`."""
        room, flags = self._room(self.blocks[block])
        got = 0

        def wait(num_groups: int) -> None:
            nonlocal got
            for number in range(got, num_groups):
                self._transfer(room, number, go_on)
            got = max(got, num_groups)

        wait(1)
        room.present = [bool(flag) for flag in flags.tolist()]
        room.wait = wait
        yield room
        room.wait_for_all()

    def _room(self, specs: Sequence[TensorSpec]) -> tuple[Room, torch.Tensor]:
        """A room, and which tensors there are, ahead of it."""
        start = aligned(len(specs))
        nbytes = start + room_bytes(specs)
        if nbytes > self._memory.nbytes:
            self._memory = HostArena(nbytes)
        return Room.of(self._memory, specs, start), self._memory.tensor[: len(specs)]

    def _transfer(self, room: Room, number: int, go_on: GoOn) -> None:
        group = room.groups[number] if room.groups else []
        if number > 0 and not any(room.present[piece.number] for piece in group):
            return
        # Pieces of a group lie one after the other.
        parts = [room.tensors[piece.number][piece.cut] for piece in group]
        start = _place(parts[0]) if number > 0 else 0
        stop = _place(parts[-1]) + parts[-1].nbytes if parts else len(room.tensors)
        self._send(self._memory.tensor[start:stop], go_on)


def _place(part: torch.Tensor) -> int:
    """Where it begins in its memory, also if it has no bytes."""
    return int(part.storage_offset()) * part.element_size()
