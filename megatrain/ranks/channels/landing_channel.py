"""LandingChannel: a channel whose rooms are where gradients stay until all ranks of a host have used them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from megatrain.memory.block_image import BlockImage, image, views
from megatrain.memory.host_arena import HostArena
from megatrain.ranks.channels.channel import Room
from megatrain.ranks.channels.host_channel import HostChannel, flag_bytes
from megatrain.ranks.channels.room_pieces import pieces
from megatrain.ranks.host_file import PAGE, HostFile, Region
from megatrain.sizes import aligned
from megatrain.tracer.spec import TensorSpec


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
