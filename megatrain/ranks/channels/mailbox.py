"""Mailbox: rooms of host memory through which the ranks of one host send each other what crosses between devices.

From each rank to each other one there is a room for each micro-batch of a step. A room is filled again when the other
rank has taken what was there: `megatrain.ranks.legs` says why nobody waits for that in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from megatrain.memory.host_arena import HostArena
from megatrain.ranks.channels.channel import GoOn
from megatrain.ranks.channels.host_channel import CHANNEL_BYTES, POLL_S
from megatrain.ranks.host_file import PAGE, HostFile
from megatrain.ranks.signs_of_life import wait_until
from megatrain.sizes import aligned

_MOST_ROOMS = 10_000
_COUNTS_BYTES = aligned(2 * 8 * _MOST_ROOMS, PAGE)
_GIVEN, _TAKEN = 0, 1

Way = tuple[int, int]
"""From a rank to another."""


class Rooms(NamedTuple):
    """The rooms of one way.

    Attributes:
        number: How many.
        nbytes: Of each.
    """

    number: int
    nbytes: int

    @property
    def place_bytes(self) -> int:
        """Bytes from one room to the next."""
        return aligned(self.nbytes, PAGE)


class Mail(NamedTuple):
    """A room while it is filled or emptied.

    Attributes:
        content: Its bytes.
        arena: Their memory; who copies between it and a device page-locks it first.
    """

    content: torch.Tensor
    arena: HostArena


class _Way:
    """One way, as one of its ends sees it."""

    def __init__(self, file: HostFile, start: int) -> None:
        self._file, self._start = file, start
        pages = file.channel(start, _COUNTS_BYTES)
        self.counts = torch.frombuffer(pages, dtype=torch.int64)[: 2 * _MOST_ROOMS].view(2, _MOST_ROOMS)
        self.rooms = Rooms(0, 0)
        self.arena = HostArena(0)

    def expect(self, rooms: Rooms) -> None:
        nbytes = rooms.number * rooms.place_bytes
        if nbytes > self.arena.nbytes:
            self.arena = HostArena.over(self._file.channel(self._start + _COUNTS_BYTES, nbytes))
        self.rooms = rooms

    def mail(self, number: int) -> Mail:
        start = number * self.rooms.place_bytes
        return Mail(self.arena.tensor[start : start + self.rooms.nbytes], self.arena)


class Mailbox:
    """The rooms between all ranks of a host, of which one end is this rank.

    Args:
        file: Has the memory.
        rank: This rank, from 0 among those of the host.
        size: How many they are.
        number: The channel of the file from which on nobody else has one.
        look: Raises an error if a rank can't go on.
    """

    def __init__(self, file: HostFile, rank: int, size: int, number: int, look: Callable[[], None]):
        self._file, self._look, self.rank, self.size = file, look, rank, size
        self._start = number * CHANNEL_BYTES
        self._ways: dict[Way, _Way] = {}

    def expect(self, rooms: Mapping[Way, Rooms]) -> None:
        """Makes rooms; both ends of each way call it for the same rooms, when nothing is under way.

        Args:
            rooms: By way, of those of which this rank is an end.
        """
        for way, wanted in rooms.items():
            if way not in self._ways:
                sender, receiver = way
                place = sender * self.size + receiver
                self._ways[way] = _Way(self._file, self._start + place * CHANNEL_BYTES)
            self._ways[way].expect(wanted)

    @contextmanager
    def give(self, receiver: int, number: int, go_on: GoOn) -> Generator[Mail]:
        """A room to be filled in the body; what is in it is then the other rank's.

        Args:
            receiver: Who gets it.
            number: Of the micro-batch.
            go_on: See `GoOn`.

        Raises:
            RanksError: If another rank can't go on.
        """
        way = self._ways[self.rank, receiver]
        given, taken = way.counts[_GIVEN], way.counts[_TAKEN]
        self._wait(lambda: int(taken[number]) == int(given[number]), go_on)
        yield way.mail(number)
        with self._file.locked():  # the lock also orders what was written before for other processors
            given[number] += 1

    @contextmanager
    def take(self, sender: int, number: int, go_on: GoOn) -> Generator[Mail]:
        """A room with what came, to be emptied in the body. For the rest see `give`."""
        way = self._ways[sender, self.rank]
        given, taken = way.counts[_GIVEN], way.counts[_TAKEN]
        self._wait(lambda: int(given[number]) > int(taken[number]), go_on)
        yield way.mail(number)
        with self._file.locked():
            taken[number] += 1

    def _wait(self, is_over: Callable[[], bool], go_on: GoOn) -> None:
        wait_until(is_over, go_on, self._look, POLL_S)
        with self._file.locked():
            pass  # as above: what comes is read after the count
