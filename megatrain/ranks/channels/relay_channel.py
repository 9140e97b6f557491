"""RelayChannel: from one rank to all others: once to each other host, and from there to its ranks through memory."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext

from megatrain.ranks.channels.channel import Channel, GoOn, Room
from megatrain.tracer.spec import TensorSpec


class RelayChannel(Channel):
    """A channel from the last rank to all others, where these are of several hosts.

    The last rank gives to the first rank of each other host. Each of these, and the last rank, give to the other ranks
    of their host.

    Args:
        between: From host to host; None for a rank that only its own host's ranks give to.
        within: Among ranks of this host; None for a rank that is alone on it.
    """

    def __init__(self, between: Channel | None, within: Channel | None):
        self._between, self._within = between, within

    def expect(self, blocks: Sequence[Sequence[TensorSpec]]) -> None:
        """See `Channel`."""
        super().expect(blocks)
        for channel in (self._between, self._within):
            if channel is not None:
                channel.expect(blocks)

    @contextmanager
    def give(self, block: int, go_on: GoOn) -> Generator[Room]:
        """See `Channel`."""
        assert self._between is not None
        with self._between.give(block, go_on) as room:
            yield room
            # Ranks of this host needn't wait until the others have it.
            self._hand_on(room, block, go_on)

    @contextmanager
    def take(self, block: int, go_on: GoOn) -> Generator[Room]:
        """See `Channel`."""
        if self._between is None:
            assert self._within is not None
            with self._within.take(block, go_on) as room:
                yield room
            return
        with self._between.take(block, go_on) as room:
            room.wait_for_all()
            self._hand_on(room, block, go_on)
            yield room

    def _hand_on(self, room: Room, block: int, go_on: GoOn) -> None:
        with nullcontext() if self._within is None else self._within.give(block, go_on) as other:
            if other is not None:
                other.present, room.kept = room.present, other.kept
                for out, tensor, is_there in zip(other.tensors, room.tensors, room.present, strict=True):
                    if is_there:
                        out.copy_(tensor)
