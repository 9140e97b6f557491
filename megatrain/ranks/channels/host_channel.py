"""HostChannel: a channel between ranks of one host, through memory that they share."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch

from megatrain.memory.host_arena import HostArena
from megatrain.ranks.channels.channel import Channel, GoOn, Room, room_bytes
from megatrain.ranks.host_file import PAGE, HostFile
from megatrain.ranks.signs_of_life import wait_until
from megatrain.sizes import aligned
from megatrain.tracer.spec import TensorSpec

NUM_ROOMS = 2
"""One is filled while another one is read."""
POLL_S = 5e-5
"""How often a rank looks whether another one is done."""
CHANNEL_BYTES = 1 << 42
"""Bytes from one channel to the next in the file: what nobody touches takes no memory."""
_GIVEN = 0
_TAKEN = 1
"""Counts in the first page: of groups that were given, and of the rooms that each rank has taken. A room begins with a
group of its own, which says what will be in it."""


class HostChannel(Channel):
    """A channel of some rooms that ranks of one host map.

    The rank that gives fills the next room, and all others read it. A room is filled again when all have read it. All
    ends find the same places by what they are asked for: a room is as large as the largest one so far.

    Args:
        file: Has the memory.
        number: Of the channel among those of the host.
        num_takers: How many ranks take.
        taker: Which of them this rank is, from 0; None for the one that gives.
        look: Raises an error if a rank can't go on.
    """

    def __init__(self, file: HostFile, number: int, num_takers: int, taker: int | None, look: Callable[[], None]):
        self._file, self._start, self._look = file, number * CHANNEL_BYTES, look
        self._taker = taker
        self._counts = torch.frombuffer(file.channel(self._start, PAGE), dtype=torch.int64)[: _TAKEN + num_takers]
        self._count = self._groups = 0
        self._arena = HostArena(0)
        self._room_bytes = 0
        self._num_rooms = NUM_ROOMS

    def expect(self, blocks: Sequence[Sequence[TensorSpec]]) -> None:
        """See `Channel`."""
        if blocks is self.blocks:
            return
        super().expect(blocks)
        needed = max((flag_bytes(specs) + aligned(room_bytes(specs), PAGE) for specs in blocks), default=0)
        if needed > self._room_bytes:
            self._room_bytes = needed
            self._arena = HostArena.over(self._file.channel(self._start + PAGE, NUM_ROOMS * needed))

    @contextmanager
    def give(self, block: int, go_on: GoOn) -> Generator[Room]:
        """See `Channel`."""
        self._wait(lambda: int(self._counts[_TAKEN:].min()) > self._count - self._num_rooms, go_on)
        room, flags = self._room(block)

        def hand_over(num_groups: int) -> None:
            flags.copy_(torch.tensor(room.present, dtype=torch.uint8))
            self._set(_GIVEN, self._groups + 1 + num_groups)

        room.hand_over = hand_over
        yield room
        hand_over(len(room.groups))
        self._end(room)

    @contextmanager
    def take(self, block: int, go_on: GoOn) -> Generator[Room]:
        """See `Channel`."""
        assert self._taker is not None
        room, flags = self._room(block)

        def wait(num_groups: int) -> None:
            self._wait(lambda: int(self._counts[_GIVEN]) > self._groups + num_groups, go_on)

        wait(0)
        room.present = [bool(flag) for flag in flags.tolist()]
        room.wait = wait
        yield room
        self._end(room)
        self._set(_TAKEN + self._taker, self._count)

    def _end(self, room: Room) -> None:
        self._count += 1
        self._groups += 1 + len(room.groups)

    def _room(self, block: int) -> tuple[Room, torch.Tensor]:
        """The next room, and which tensors there are, in pages ahead of it."""
        specs, start = self.blocks[block], self._count % NUM_ROOMS * self._room_bytes
        room = Room.of(self._arena, specs, start + flag_bytes(specs))
        return room, self._arena.tensor[start : start + len(specs)]

    def _set(self, index: int, count: int) -> None:
        # The lock also orders what was written before for other processors.
        with self._file.locked():
            self._counts[index] = count

    def _wait(self, is_over: Callable[[], bool], go_on: GoOn) -> None:
        wait_until(is_over, go_on, self._look, POLL_S)
        with self._file.locked():
            pass  # as in `_set`: what comes is read after the count


def flag_bytes(specs: Sequence[TensorSpec]) -> int:
    """Of the pages ahead of a room that say which tensors there are."""
    return aligned(len(specs), PAGE)
