"""Account: the device bytes of drafts of one workload; what drafts have in common is worked out once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from operator import add

from megatrain.scheduler.builder.rows.row import OpRow, RowEffect, RowEffects
from megatrain.scheduler.items import Stream
from megatrain.scheduler.lifetimes.lifetime import MOMENTS, begin_of, end_of, of_ticks, union


class Account:
    """Counts the device bytes of drafts, as `live_bytes` counts those of `item_lifetimes`.

    Args:
        items: Describes the items.
    """

    def __init__(self, items: RowEffects) -> None:
        self._items = items

    def of(
        self, rows: Sequence[OpRow], effects: Sequence[RowEffect], num_ticks: int, arena: int
    ) -> tuple[tuple[int, ...], int]:
        """Live bytes of each tick, and the most of a tick with its op's workspace.

        Args:
            rows: Of all ops but `W` and `C`, which make nothing that has a lifetime: slots exist all the time.
            effects: Of each row.
            num_ticks: Rows of the table.
            arena: Bytes of the slots.
        """
        spans = _Spans(self._items, MOMENTS * num_ticks)
        computes = sorted(tick for row in rows if row.stream == Stream.COMPUTE for tick in row.ticks)
        for row, effect in zip(rows, effects, strict=True):
            if effect.takes or effect.takes_once:
                spans.take(effect, _running(row) if row.stream == Stream.COMPUTE else _taken_before(computes, row))
            spans.read(effect, [end_of(tick, row.stream) for tick in row.ticks])
        live = spans.live(arena)
        # `C` has no workspace: only F and B have one.
        busy = (
            max(map(add, map(live.__getitem__, _running(row)), effect.workspace))
            for row, effect in zip(rows, effects, strict=True)
            if row.stream == Stream.COMPUTE
        )
        return of_ticks(live), max(max(live, default=0), max(busy, default=0))


class _Spans:
    """From which moment to which each item of the device exists: of each micro-batch, or once.

    Args:
        items: Describes the items.
        num_moments: Of all ticks.
    """

    def __init__(self, items: RowEffects, num_moments: int) -> None:
        self._items, self._num_moments = items, num_moments
        here, count = (item for item in items.standing if items.memory[item] == "device"), items.num_micro_batches
        self._starts: dict[int, Sequence[int]] = {item: [0] * count for item in here}
        self._ends: dict[int, Sequence[int]] = {}

    def take(self, effect: RowEffect, begins: Sequence[int]) -> None:
        """Notes items whose memory is taken at these moments at the latest."""
        starts = self._starts
        for item in effect.takes:
            before = starts.get(item)
            starts[item] = begins if before is None else list(map(min, before, begins))
        for item, ops in effect.takes_once:
            first = min(begins) if len(ops) == len(begins) else min(begins[op] for op in ops)
            starts[item] = [min([first, *starts.get(item, ())])]

    def read(self, effect: RowEffect, moments: Sequence[int]) -> None:
        """Notes items that are read at these moments."""
        ends = self._ends
        for item in effect.ends:
            before = ends.get(item)
            # Most rows of compute come after all that have read before.
            ends[item] = moments if before is None or before[-1] < moments[0] else list(map(max, before, moments))
        for item, ops in effect.ends_once:
            last = max(moments) if len(ops) == len(moments) else max(moments[op] for op in ops)
            ends[item] = [max([last, *ends.get(item, ())])]

    def live(self, arena: int) -> tuple[int, ...]:
        """The bytes that exist at each moment.

        Args:
            arena: Those that exist all the time.
        """
        items = self._items
        change = [0] * (self._num_moments + 1)
        change[0] = arena
        shared: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        standing = frozenset(items.standing)
        for item in {**self._starts, **self._ends}:
            starts, ends = self._span(item, is_standing=item in standing)
            nbytes, storage = items.nbytes[item], items.storage[item]
            if storage is not None:
                for number, span in enumerate(zip(starts, ends, strict=True)):
                    shared.setdefault((storage, number, nbytes), []).append(span)
                continue
            for start in starts:
                change[start] += nbytes
            for end in ends:
                change[end + 1] -= nbytes
        for (_, _, nbytes), spans in shared.items():
            for start, end in union(spans):
                change[start] += nbytes
                change[end + 1] -= nbytes
        return tuple(accumulate(change[: self._num_moments]))

    def _span(self, item: int, *, is_standing: bool) -> tuple[Sequence[int], Sequence[int]]:
        """The first and the last moments of an item."""
        starts, ends = self._starts.get(item), self._ends.get(item)
        if starts is None:
            starts = [0] * len(ends or ())
        if self._items.outlives[item] or (ends is None and is_standing):
            ends = [self._num_moments - 1] * len(starts)
        return starts, starts if ends is None else ends  # what nobody reads dies with the op that makes it


def _running(row: OpRow) -> list[int]:
    """The moments while ops of compute run."""
    return [begin_of(tick, is_brought=False) for tick in row.ticks]


def _taken_before(computes: Sequence[int], row: OpRow) -> list[int]:
    """The moments in which memory is taken that transfers fill: after ops of compute, or the start of the step."""
    earlier = (bisect_left(computes, tick) for tick in row.ticks)
    return [begin_of(computes[count - 1], is_brought=True) if count else 0 for count in earlier]
