"""Totals go once to each other host, and from there through its memory."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from megatrain.memory.host_arena import HostArena
from megatrain.ranks.channels.channel import Channel, GoOn, Room, room_bytes
from megatrain.ranks.channels.relay_channel import RelayChannel
from megatrain.tracer.spec import TensorSpec

SPECS = [TensorSpec((3,), torch.float32), TensorSpec((2, 2), torch.float32)]


class Keeping(Channel):
    """A channel that keeps what it is given, and gives it to who takes."""

    def __init__(self) -> None:
        self.kept: list[list[torch.Tensor | None]] = []

    @contextmanager
    def give(self, block: int, go_on: GoOn) -> Generator[Room]:
        """Keeps copies."""
        room = Room.of(HostArena(room_bytes(SPECS)), SPECS)
        yield room
        self.kept.append([t.clone() if there else None for t, there in zip(room.tensors, room.present, strict=True)])

    @contextmanager
    def take(self, block: int, go_on: GoOn) -> Generator[Room]:
        """The oldest of them."""
        room, found = Room.of(HostArena(room_bytes(SPECS)), SPECS), self.kept.pop(0)
        room.present = [tensor is not None for tensor in found]
        for out, tensor in zip(room.tensors, found, strict=True):
            if tensor is not None:
                out.copy_(tensor)
        yield room


def nothing() -> None:
    """Nobody fails."""


def test_totals_reach_each_host_once_and_all_of_its_ranks():
    between, of_last, of_other = Keeping(), Keeping(), Keeping()
    last, leader = RelayChannel(between, of_last), RelayChannel(between, of_other)
    mate, alone = RelayChannel(None, of_other), RelayChannel(between, None)
    with last.give(0, nothing) as room:
        room.tensors[0].fill_(7.0)
        room.present = [True, False]
    assert [len(channel.kept) for channel in (between, of_last, of_other)] == [1, 1, 0]
    for end in (leader, mate):
        with end.take(0, nothing) as found:
            assert found.present == [True, False]
            assert found.tensors[0].tolist() == [7.0] * 3
    assert [len(channel.kept) for channel in (between, of_other)] == [0, 0]
    with alone.give(0, nothing) as room:
        room.present = [False, True]
        room.tensors[1].fill_(1.0)
    with alone.take(0, nothing) as found:
        assert (found.present, found.tensors[1].sum()) == ([False, True], 4.0)
