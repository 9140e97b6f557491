"""Lifetime: from when to when an item takes memory, and how many bytes exist at each moment.

A tick has two moments: while its op of compute runs, and when that op is over. The second has no workspace, and nothing
that this op was the last to use; memory for what transfers bring is taken then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatrain.scheduler.items import ITEMS, Item, Stream
from megatrain.scheduler.table import Position

# Moments of a tick.
MOMENTS = 2


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One life of an item, between two moments.

    Args:
        item: The item.
        nbytes: Bytes that it takes in its memory.
        start: The op with which its memory is taken; None if it exists, or its memory is taken, when the step begins.
        ends: The item is released when all these ops are done; empty if it outlives the step.
        storage: The storage that it shares with other items of its micro-batch, whose bytes count once.
        is_brought: A transfer makes it: its memory is taken when the op of `start` is over, not when it begins.
    """

    item: Item
    nbytes: int
    start: Position | None
    ends: tuple[Position, ...]
    storage: int | None = None
    is_brought: bool = False

    @property
    def memory(self) -> str | None:
        """Where it lives; see `ItemKind`."""
        return ITEMS[self.item.kind].memory


def begin_of(tick: int, *, is_brought: bool) -> int:
    """The moment from which on memory is taken that an op of compute takes: for itself, or for a transfer."""
    return MOMENTS * tick + is_brought


def end_of(tick: int, stream: Stream) -> int:
    """The last moment of what an op is the last to use; what a transfer used is released by later ticks."""
    return MOMENTS * tick + (stream != Stream.COMPUTE)


def live_moments(lives: Iterable[Lifetime], num_ticks: int, base: int = 0) -> tuple[int, ...]:
    """Bytes that exist at each moment, two for each tick.

    This bounds the memory at run time for any timing, because an op that takes memory waits for the ops of earlier
    ticks that release some (the "memory" edges of the dependency graph). So things that exist at the same time
    pairwise share a moment, and intervals that pairwise meet have a moment in common.

    Args:
        lives: Of one memory.
        num_ticks: Rows of the table.
        base: Bytes that exist all the time.
    """
    change = [0] * (MOMENTS * num_ticks + 1)
    change[0] = base
    shared: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for life in lives:
        start, end = span(life, num_ticks)
        if life.storage is not None:
            shared.setdefault((life.storage, life.item.micro_batch, life.nbytes), []).append((start, end))
        else:
            change[start] += life.nbytes
            change[end + 1] -= life.nbytes
    for (_, _, nbytes), spans in shared.items():
        for start, end in union(spans):
            change[start] += nbytes
            change[end + 1] -= nbytes
    return tuple(accumulate(change[:-1]))


def live_bytes(lives: Iterable[Lifetime], num_ticks: int, base: int = 0) -> tuple[int, ...]:
    """Bytes that exist in each tick, at the moment that has more; see `live_moments`."""
    return of_ticks(live_moments(lives, num_ticks, base))


def of_ticks(moments: Sequence[int]) -> tuple[int, ...]:
    """The larger figure of each tick, of figures for each moment."""
    return tuple(map(max, moments[::MOMENTS], moments[1::MOMENTS]))


def span(life: Lifetime, num_ticks: int) -> tuple[int, int]:
    """First and last moment of a lifetime, both inclusive."""
    start = 0 if life.start is None else begin_of(life.start.tick, is_brought=life.is_brought)
    if not life.ends:
        return start, MOMENTS * num_ticks - 1
    return start, max(start, *[end_of(end.tick, end.stream) for end in life.ends])


def union(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """All spans, as spans that don't meet."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
