"""Channels: how the tensors of one block go from one rank to others, through rooms of host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

from megatrain.memory.block_image import BlockImage, image, views
from megatrain.memory.host_arena import HostArena
from megatrain.ranks.host import PAGE, HostFile, Region
from megatrain.ranks.signs_of_life import wait_until
from megatrain.sizes import SUM_PIECE_BYTES, aligned
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


@dataclass(frozen=True, slots=True)
class _Rooms:
    """The rooms of all blocks of a model, one after the other.

    Args:
        layouts: Of each.
        starts: The first byte of each, where its flags are.
        arena: Their memory as all ranks see it.
        region: The same, with this rank's own view of it.
    """

    layouts: Sequence[BlockImage]
    starts: Sequence[int]
    arena: HostArena
    region: Region


class LandingChannel(HostChannel):
    """A channel with a room for each block, whose tensors stay there, in the layout of their parameters.

    A rank changes them in a view of its own: a hook that writes into a gradient runs on each rank, and on the total.
    Its copies of the pages that it has written are dropped when the next total of the block comes.

    Nobody has to ask whether all ranks are done with a room: a total has a term of each rank, and a rank computes the
    term of a block after it has used the block's last total.
    """

    def __init__(self, file: HostFile, number: int, num_takers: int, taker: int | None, look: Callable[[], None]):
        super().__init__(file, number, num_takers, taker, look)
        self._used = 0
        self._known: dict[tuple[tuple[TensorSpec, ...], ...], _Rooms] = {}
        self._rooms: _Rooms | None = None

    def expect(self, blocks: Sequence[Sequence[TensorSpec]]) -> None:
        """See `Channel`. Totals of other blocks, as of a model that is cut otherwise, have rooms of their own."""
        if blocks is self.blocks:
            return
        self.blocks = blocks
        self._num_rooms = max(1, sum(map(bool, blocks)))
        key = tuple(map(tuple, blocks))
        if key not in self._known:
            layouts = [image([(str(number), spec) for number, spec in enumerate(specs)]) for specs in blocks]
            sizes = [flag_bytes(s) + aligned(each.nbytes, PAGE) for s, each in zip(blocks, layouts, strict=True)]
            *starts, nbytes = accumulate(sizes, initial=0)
            region = self._file.channel_region(self._start + PAGE + self._used, max(PAGE, nbytes))
            self._used += aligned(nbytes, PAGE)
            self._known[key] = _Rooms(layouts, starts, HostArena.over(region.shared), region)
        self._rooms = self._known[key]

    def _room(self, block: int) -> tuple[Room, torch.Tensor]:
        assert self._rooms is not None
        rooms, specs = self._rooms, self.blocks[block]
        flags = rooms.starts[block]
        start, layout = flags + flag_bytes(specs), rooms.layouts[block]
        stop = start + layout.nbytes
        if layout.nbytes and rooms.region.is_written(start, layout.nbytes):
            rooms.region.drop(start, layout.nbytes)
        own = torch.frombuffer(rooms.region.private, dtype=torch.uint8)
        room = Room(rooms.arena, views(layout, rooms.arena.tensor[start:stop]), pieces(specs))
        room.kept = views(layout, own[start:stop])
        return room, rooms.arena.tensor[flags : flags + len(specs)]


Cut = tuple[slice, ...]
"""An index that gives a part of a tensor, in each of its layouts."""


class Piece(NamedTuple):
    """A part of one of several tensors.

    Attributes:
        number: Of the tensor.
        cut: The part.
    """

    number: int
    cut: Cut


def pieces(specs: Sequence[TensorSpec], most: int = SUM_PIECE_BYTES) -> list[list[Piece]]:
    """Divides tensors into groups of parts, in their order.

    Args:
        specs: Of the tensors.
        most: Bytes of a group, if no element is larger.

    >>> import torch
    >>> groups = pieces([TensorSpec((5,), torch.int8), TensorSpec((3,), torch.int8)], most=4)
    >>> [[(piece.number, *piece.cut) for piece in group] for group in groups]
    [[(0, slice(0, 4, None))], [(0, slice(4, 5, None)), (1,)]]
    """
    found: list[list[Piece]] = []
    room = 0
    for number, spec in enumerate(specs):
        for cut, nbytes in _cuts(spec.shape, spec.dtype.itemsize, most):
            if nbytes > room or not found:
                found.append([])
                room = most
            found[-1].append(Piece(number, cut))
            room -= nbytes
    return found


def _cuts(shape: Sequence[int], itemsize: int, most: int) -> Iterator[tuple[Cut, int]]:
    """Parts of a tensor, and the bytes of each."""
    nbytes = prod(shape) * itemsize
    if nbytes <= most or not shape:
        yield (), nbytes
        return
    row = nbytes // shape[0]
    if row > most:
        for index in range(shape[0]):
            yield from (((slice(index, index + 1), *cut), part) for cut, part in _cuts(shape[1:], itemsize, most))
        return
    rows = most // row
    for start in range(0, shape[0], rows):
        stop = min(start + rows, shape[0])
        yield (slice(start, stop),), (stop - start) * row
