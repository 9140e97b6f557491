"""GlooChannel: a channel between ranks of different hosts, through collectives of Gloo."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatrain.memory.host_arena import HostArena
from megatrain.ranks.channel import Channel, GoOn, Room, room_bytes
from megatrain.ranks.packet import Packet
from megatrain.tracer.spec import TensorSpec

Send = Callable[[torch.Tensor, GoOn], None]
"""Gives bytes to all ranks of a group, or gets them; returns when that is over."""


class GlooChannel(Channel):
    """A channel in which each transfer is a broadcast: asynchronous, so that its end can be given up.

    Args:
        send: See `Send`.
    """

    def __init__(self, send: Send):
        self._send = send
        self._memory = HostArena(0)

    @contextmanager
    def give(self, specs: Sequence[TensorSpec], go_on: GoOn) -> Generator[Room]:
        """See `Channel`."""
        room = self._room(specs)
        yield room
        pairs = zip(room.tensors, room.present, strict=True)
        self._transfer(Packet.of([tensor if is_there else None for tensor, is_there in pairs], specs), go_on)

    @contextmanager
    def take(self, specs: Sequence[TensorSpec], go_on: GoOn) -> Generator[Room]:
        """See `Channel`."""
        room = self._room(specs)
        packet = Packet.into(room.tensors)
        self._transfer(packet, go_on)
        room.present = packet.present
        yield room

    def _room(self, specs: Sequence[TensorSpec]) -> Room:
        nbytes = room_bytes(specs)
        if nbytes > self._memory.nbytes:
            self._memory = HostArena(nbytes)
        return Room.of(self._memory, specs)

    def _transfer(self, packet: Packet, go_on: Any) -> None:
        for part in packet.parts():
            self._send(part, go_on)
