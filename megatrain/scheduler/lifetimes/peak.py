"""Peak: the moment that needs the most device memory, and what for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatrain.scheduler.items import ITEMS
from megatrain.scheduler.lifetimes.books import Books
from megatrain.scheduler.lifetimes.lifetime import MOMENTS, Lifetime, begin_of, live_moments, span
from megatrain.scheduler.op import Op
from megatrain.scheduler.table import Table


@dataclass(frozen=True, slots=True)
class Peak:
    """The tick that needs the most device memory, and the parts of this memory.

    Args:
        moment: The first such moment, of two for each tick.
        op: The tick's F or B, or another op of it if there is none.
        parts: Bytes by kind, none of them zero, largest first; they add up to the schedule's `device_bytes`.
    """

    moment: int
    op: Op | None
    parts: tuple[tuple[str, int], ...]

    @property
    def tick(self) -> int:
        """The tick."""
        return self.moment // MOMENTS

    @property
    def is_after(self) -> bool:
        """Whether the tick's op of compute is over then: its workspace is given back."""
        return self.moment % MOMENTS > 0


def alive_at(books: Books, moment: int) -> Iterator[Lifetime]:
    """The lives that take bytes of the device at a moment; of those that share a storage, the first."""
    storages: set[tuple[int, int]] = set()
    for life in books.lifetimes:
        start, end = span(life, len(books.table.ticks))
        shared = None if life.storage is None else (life.storage, life.item.micro_batch)
        if life.memory == "device" and start <= moment <= end and shared not in storages:
            yield life
            storages |= set() if shared is None else {shared}


def device_moments(books: Books) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The device bytes that exist at each moment, and those with the workspace of the ops that run then."""
    lives = (life for life in books.lifetimes if life.memory == "device")
    live = live_moments(lives, len(books.table.ticks), books.table.arena_bytes)
    needed = list(live)
    for op, (position, _) in zip(books.table.ops, books.ops, strict=True):
        needed[begin_of(position.tick, is_brought=False)] += books.effects.workspace(*op.key)
    return live, tuple(needed)


def find_peak(table: Table) -> Peak:
    """Says when a schedule needs `device_bytes`, and for what.

    Raises:
        ScheduleError: If the table doesn't know its workload.
    """
    books = Books(table)
    _, needed = device_moments(books)
    moment = max(range(len(needed)), key=lambda m: (needed[m], -m))
    peak = Peak(moment, None, ())
    row = table.ticks[peak.tick]
    ops = [] if peak.is_after else [op.key for op in row.values()]
    workspace = sum(books.effects.workspace(*op) for op in ops)
    is_loss = any(0 < books.effects.workspace(*op) == books.effects.loss_workspace(*op[1:]) for op in ops)
    parts = {"weights": table.arena_bytes, "loss" if is_loss else "workspace": workspace}
    for life in alive_at(books, moment):
        part = ITEMS[life.item.kind].part
        parts[part] = parts.get(part, 0) + life.nbytes
    ordered = sorted((p for p in parts.items() if p[1] > 0), key=lambda p: -p[1])
    return replace(peak, op=row.compute or row.d2h or row.h2d, parts=tuple(ordered))
