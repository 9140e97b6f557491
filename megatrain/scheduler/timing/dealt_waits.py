"""dealt_waits(): for which ops each op waits where blocks are dealt to devices, on its own device and on others."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.scheduler.dealt.messages import received_by, sent_by
from megatrain.scheduler.dependency import all_waits
from megatrain.scheduler.lifetimes.books import Books
from megatrain.scheduler.timing.rank_waits import Place, RankWaits, rank_waits


def dealt_waits(books: Sequence[Books]) -> RankWaits:
    """Finds all waits of a step of several devices with the blocks of one model.

    Args:
        books: Of each device's table.
    """
    ends: dict[Place, set[Place]] = {}
    squares: set[Place] = set()
    received = {
        route: its for device, each in enumerate(books) for route, its in received_by(device, each.table).items()
    }
    for device, its in enumerate(books):
        ends |= {(device, after): {(device, b) for b in before} for after, before in all_waits(its).items()}
        squares |= {(device, position) for position, op in its.table.positions() if op.what == "S"}
    for device, its in enumerate(books):
        for route, sent in sent_by(device, its.table).items():
            for (goes, _), (comes, _) in zip(sent, received[route], strict=True):
                ends[route[1], comes].add((device, goes))
            for (before, _), (goes, _) in zip(received[route], sent[1:], strict=False):
                ends[device, goes].add((route[1], before))  # the room of this micro-batch is free then
        for position, op in its.table.positions():
            if op.what == "N":
                ends[device, position] |= squares
    return RankWaits(ends, {})


def waits_of(books: Sequence[Books], hosts: Sequence[int] | None = None) -> RankWaits:
    """All waits of a step of several ranks, however the work is divided among them; see `rank_waits`."""
    return dealt_waits(books) if books[0].table.kind.is_dealt else rank_waits(books, hosts)
