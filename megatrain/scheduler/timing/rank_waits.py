"""rank_waits(): for which ops each op of several ranks waits, on its own rank and on others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatrain.scheduler.dependency import all_waits
from megatrain.scheduler.lifetimes.books import Books
from megatrain.scheduler.table import Position, Table

Place = tuple[int, Position]
"""A rank, and an op of its table."""


class RankWaits(NamedTuple):
    """Who waits for whom, besides the order of each stream.

    Attributes:
        ends: Per op those of other streams and of other ranks whose ends it waits for, before it begins.
        pieces: An op that handles a sum piece by piece, and the op of the rank before whose pieces it follows: it can
            begin earlier, and ends later.
    """

    ends: Mapping[Place, set[Place]]
    pieces: Mapping[Place, Place]


def books_of_ranks(tables: Sequence[Table]) -> list[Books]:
    """The books of each rank's table; ranks with one table have one."""
    made: dict[int, Books] = {}
    for table in tables:
        if id(table) not in made:
            made[id(table)] = Books(table)
    return [made[id(table)] for table in tables]


def rank_waits(books: Sequence[Books], hosts: Sequence[int] | None = None) -> RankWaits:
    """Finds all waits of a step of several ranks.

    Args:
        books: Of each rank's table, first rank to last.
        hosts: The number of each rank's host, within which ranks share a store; None is one host for all.
    """
    ends: dict[Place, set[Place]] = {}
    pieces: dict[Place, Place] = {}
    own: dict[int, Mapping[Position, set[Position]]] = {}
    for rank, its in enumerate(books):
        if id(its) not in own:
            own[id(its)] = all_waits(its)
        ends |= {(rank, after): {(rank, before) for before in befores} for after, befores in own[id(its)].items()}
    numbers = [0] * len(books) if hosts is None else hosts
    _gathers(books, numbers, ends)
    found = [_by_block(its.table) for its in books]
    last = len(books) - 1
    for rank, (its, of_rank) in enumerate(zip(books, found, strict=True)):
        kind = its.table.kind
        for (what, block), positions in of_rank.items():
            if what == ("R" if kind.receives else kind.adding_op):
                pieces[rank, positions[0]] = rank - 1, found[rank - 1]["P", block][0]
            if what == "G" and rank < last:
                ends[rank, positions[0]].add((last, found[last]["G", block][0]))
            elif what == "V":
                mates = [other for other, number in enumerate(numbers) if number == numbers[rank]]
                ends[rank, positions[0]].update(
                    (other, update) for other in mates for update in found[other]["U", block]
                )
    return RankWaits(ends, pieces)


def _gathers(books: Sequence[Books], hosts: Sequence[int], ends: dict[Place, set[Place]]) -> None:
    """A `C` begins when it could on all ranks of its host, which have the same ones in the same order."""
    found = [[position for position, op in its.table.positions() if op.what == "C"] for its in books]
    for host in dict.fromkeys(hosts):
        mates = [rank for rank, number in enumerate(hosts) if number == host]
        before: set[Place] = set()
        for same in zip(*(found[rank] for rank in mates), strict=True):
            places = list(zip(mates, same, strict=True))
            together = before.union(*(ends[place] for place in places))
            for place in places:
                ends[place] = set(together)
            before = set(places)


def _by_block(table: Table) -> dict[tuple[str, int], list[Position]]:
    found: dict[tuple[str, int], list[Position]] = {}
    for position, op in table.positions():
        found.setdefault((op.what, op.block), []).append(position)
    return found
