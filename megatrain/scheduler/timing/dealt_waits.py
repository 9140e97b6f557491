"""dealt_waits(): for which ops each op waits where blocks are dealt to devices, on its own device and on others."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.scheduler.dealt.messages import received_by, sent_by
from megatrain.scheduler.dependency import all_waits
from megatrain.scheduler.lifetimes.books import Books
from megatrain.scheduler.timing.rank_waits import Place, RankWaits, rank_waits


def dealt_waits(books: Sequence[Books], hosts: Sequence[int] | None = None) -> RankWaits:
    """Finds all waits of a step of several devices with the blocks of one model.

    Args:
        books: Of each device's table, those of a host in their order.
        hosts: The number of each device's host, which deals the blocks to its devices; None is one host for all.
    """
    ends: dict[Place, set[Place]] = {}
    pieces: dict[Place, Place] = {}
    numbers = [0] * len(books) if hosts is None else hosts
    mates_of = [[rank for rank, other in enumerate(numbers) if other == host] for host in dict.fromkeys(numbers)]
    for mates in mates_of:
        _on_host([books[rank] for rank in mates], mates, ends)
    for column in zip(*mates_of, strict=True):
        found = [{(op.what, op.block): at for at, op in books[rank].table.positions()} for rank in column]
        for number, (rank, own) in enumerate(zip(column, found, strict=True)):
            for (what, block), position in own.items():
                if what == "R":
                    pieces[rank, position] = column[number - 1], found[number - 1]["P", block]
                elif what == "G" and rank != column[-1]:
                    ends[rank, position].add((column[-1], found[-1]["G", block]))
    return RankWaits(ends, pieces)


def _on_host(books: Sequence[Books], ranks: Sequence[int], ends: dict[Place, set[Place]]) -> None:
    """Adds the waits of the devices of one host, which are those of some ranks."""
    squares: set[Place] = set()
    received = {
        route: its for device, each in enumerate(books) for route, its in received_by(device, each.table).items()
    }
    for rank, its in zip(ranks, books, strict=True):
        ends |= {(rank, after): {(rank, b) for b in before} for after, before in all_waits(its).items()}
        squares |= {(rank, position) for position, op in its.table.positions() if op.what == "S"}
    for device, (rank, its) in enumerate(zip(ranks, books, strict=True)):
        for route, sent in sent_by(device, its.table).items():
            other = ranks[route[1]]
            for (goes, _), (comes, _) in zip(sent, received[route], strict=True):
                ends[other, comes].add((rank, goes))
            for (before, _), (goes, _) in zip(received[route], sent[1:], strict=False):
                ends[rank, goes].add((other, before))  # the room of this micro-batch is free then
        for position, op in its.table.positions():
            if op.what == "N":
                ends[rank, position] |= squares


def waits_of(books: Sequence[Books], hosts: Sequence[int] | None = None) -> RankWaits:
    """All waits of a step of several ranks, however the work is divided among them; see `rank_waits`."""
    return dealt_waits(books, hosts) if books[0].table.kind.is_dealt else rank_waits(books, hosts)
