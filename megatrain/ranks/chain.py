"""Chain: the ranks along which sums of gradients go, and the channels between this one and its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatrain.errors import RanksError
from megatrain.ranks.channels.channel import Channel
from megatrain.ranks.channels.gloo_channel import GlooChannel, Send
from megatrain.ranks.channels.host_channel import HostChannel
from megatrain.ranks.channels.landing_channel import LandingChannel
from megatrain.ranks.channels.relay_channel import RelayChannel
from megatrain.ranks.host import Host

Group = Callable[[str, Sequence[int]], Any]
"""Makes a group of Gloo of some ranks, by a name; all of them call it at the same time."""
Sender = Callable[[Any, int], Send]
"""What gives bytes of a member of such a group to all of them."""


class Chain(NamedTuple):
    """The channels of a rank.

    Attributes:
        place: Where this rank stands in the chain, as in `StepKind`.
        before: From the rank before this one; None for the first.
        after: To the rank after this one; None for the last.
        totals: From the last rank to all others; None for a rank alone.
        kept_totals: The same, into memory where they stay, if ranks of the chain share this host; else `totals`.
    """

    place: str
    before: Channel | None
    after: Channel | None
    totals: Channel | None
    kept_totals: Channel | None


def open_chain(
    rank: int,
    members: Sequence[int],
    mates_of: Sequence[Sequence[int]],
    host: Host | None,
    group: Group,
    sender: Sender,
    look: Callable[[], None],
) -> Chain:
    """Opens the channels of a chain; all of its ranks call it at the same time.

    Between ranks of one host they are memory, others collectives of Gloo in groups of their own, where the order of
    those in one group is all that ranks must agree on.

    Args:
        rank: This rank.
        members: The ranks of the chain, ascending.
        mates_of: Of each rank of the whole group those on its host, itself included.
        host: This one; None for a rank that shares no memory.
        group: See `Group`.
        sender: See `Sender`.
        look: Raises an error if a rank can't go on.
    """
    place, last, size = members.index(rank), members[-1], len(mates_of)

    def channel(what: str, giver: int, takers: Sequence[int]) -> Channel | None:
        """From one rank to others, in memory if all are of one host; None if this rank isn't among them."""
        if not takers or rank not in (giver, *takers):
            return None
        if host is not None and {giver, *takers} <= {*host.ranks}:
            taker = takers.index(rank) if rank in takers else None
            number = {"totals": size, "kept totals": size + 1}.get(what, giver)
            kind = LandingChannel if what == "kept totals" else HostChannel
            return kind(host.file, number, len(takers), taker, look)
        several = sorted({giver, *takers})
        return GlooChannel(sender(group(what, several), several.index(giver)))

    def pair(first: int) -> Channel | None:
        there = 0 <= first < len(members) - 1
        return channel(f"pair/{members[first]}", members[first], [members[first + 1]]) if there else None

    before, after = pair(place - 1), pair(place)
    # To one rank of each other host, which hands on to its mates.
    on_hosts = [[other for other in mates_of[member] if other in members] for member in members]
    first_of = [last if last in mates else mates[0] for mates in on_hosts]
    between = channel(f"between hosts/{last}", last, sorted({*first_of} - {last}))
    mine, giver = on_hosts[place], first_of[place]
    mates = [other for other in mine if other != giver]
    totals, kept_totals = (
        within if between is None and last in mine else RelayChannel(between, within)
        for within in (channel(what, giver, mates) for what in ("totals", "kept totals"))
    )
    return Chain(_name(place, len(members)), before, after, totals, kept_totals)


def _name(place: int, size: int) -> str:
    if size == 1:
        return "alone"
    return "first" if place == 0 else "last" if place == size - 1 else "middle"


def column(rank: int, hosts: Sequence[Sequence[int]]) -> list[int]:
    """The ranks of all hosts whose devices have the same blocks, where each host deals the blocks to its ranks.

    Args:
        rank: One of them.
        hosts: The ranks of each host that share memory, ascending, the host of rank 0 first.

    Raises:
        RanksError: If hosts can't deal the blocks alike.
    """
    sizes = [len(mates) for mates in hosts]
    way_out = '  Leave across_devices out: "replicate" trains on any hosts.'
    if min(sizes) == 1:
        alone = hosts[sizes.index(1)][0]
        raise RanksError(
            f"rank {alone} shares no memory with others, so that blocks can't be dealt to their devices.\n"
            "  What crosses between devices goes through the memory of one host, which has several ranks and one "
            f"store.\n{way_out}"
        )
    if len(set(sizes)) > 1:
        raise RanksError(
            f"hosts have {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks, so that blocks can't be dealt to "
            "their devices.\n"
            "  Each host deals all blocks to its ranks, and one rank of each host has the same blocks.\n"
            f"  Start as many ranks on each host. {way_out.strip()}"
        )
    apart = next((mates for mates in hosts if mates[-1] - mates[0] != len(mates) - 1), None)
    if apart is not None:
        raise RanksError(
            f"ranks {', '.join(map(str, apart))} are on one host, and ranks between them on another.\n"
            "  Where blocks are dealt, the micro-batches of a host are added up after those of the hosts before it.\n"
            f"  Number the ranks host by host, as torchrun does. {way_out.strip()}"
        )
    index = next(mates for mates in hosts if rank in mates).index(rank)
    return [mates[index] for mates in hosts]
