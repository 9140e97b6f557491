"""Account: the device bytes of drafts of one workload; what drafts have in common is worked out once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from megatrain.scheduler.effects import Effects
from megatrain.scheduler.items import ITEMS, Item, Stream
from megatrain.scheduler.lifetimes.lifetime import MOMENTS, begin_of, end_of, of_ticks, union
from megatrain.scheduler.parking import Parks

_Key = tuple[str, int, int, int | None]
Placed = tuple[Stream, int, _Key]
"""An op in a draft: stream, tick, and letter, block, micro-batch and section."""


class _Effect(NamedTuple):
    """What an op does to the device's memory; items are indices.

    Attributes:
        takes: Items whose memory is taken with it, or after the op of compute before it.
        reads: Items that it needs.
        workspace: Bytes that it takes while it runs.
    """

    takes: tuple[int, ...]
    reads: tuple[int, ...]
    workspace: int


class Account:
    """Counts the device bytes of drafts, as `live_bytes` counts those of `item_lifetimes`.

    The effect of an op depends on few choices of a plan: whether its block's graph is retained or its results are kept,
    and which values that it touches are parked. So each effect is made once for each of these.

    Args:
        effects: Makes the effects of a plan; of those asked for.
    """

    def __init__(self, effects: Effects) -> None:
        self._touched = [
            tuple(dict.fromkeys((*inputs, *outputs, *results)))
            for inputs, outputs, results in zip(effects.inputs, effects.outputs, effects.kept, strict=True)
        ]
        self._known: dict[Hashable, dict[_Key, _Effect]] = {}
        self._items: dict[Item, int] = {}
        self._nbytes: list[int] = []
        self._outlives: list[bool] = []
        self._shared: list[tuple[int, int, int] | None] = []
        self._standing = self._numbers(effects, effects.standing())

    def of(
        self,
        ops: Collection[Placed],
        saves: Collection[int],
        results: Collection[int],
        parked: Parks,
        num_ticks: int,
        arena: int,
        effects: Callable[[], Effects],
    ) -> tuple[tuple[int, ...], int]:
        """Live bytes of each tick, and the most of a tick with its op's workspace.

        Args:
            ops: All but `W`.
            saves: As in `Effects`.
            results: As in `Effects`.
            parked: As in `Effects`.
            num_ticks: Rows of the table.
            arena: Bytes of the slots.
            effects: Makes those of the plan, if some are new.
        """
        away = {value for values in parked.values() for value in values}
        retained, kept = frozenset(saves), frozenset(results)
        known = self._known.setdefault
        of_compute = [
            known((block, block in retained, block in kept, *map(away.__contains__, touched)), {})
            for block, touched in enumerate(self._touched)
        ]
        of_others = known(None, {})
        computes = sorted(tick for stream, tick, _ in ops if stream == Stream.COMPUTE)
        starts, ends = dict.fromkeys(self._standing, 0), dict[int, int]()
        busy: list[tuple[int, int]] = []
        for stream, tick, key in ops:
            what, block, _, _ = key
            if stream == Stream.COMPUTE:
                found, begin = of_compute[block], begin_of(tick, is_brought=False)
            elif what == "A":
                found, begin = known((stream, *parked[block]), {}), _taken_before(computes, tick)
            else:
                found, begin = of_others, _taken_before(computes, tick)
            end = end_of(tick, stream)
            effect = found.get(key) or found.setdefault(key, self._effect(stream, key, effects()))
            for item in effect.takes:
                if begin < starts.get(item, begin + 1):
                    starts[item] = begin
            for item in effect.reads:
                if end > ends.get(item, -1):
                    ends[item] = end
            if effect.workspace:
                busy.append((begin_of(tick, is_brought=False), effect.workspace))
        live = self._live(starts, ends, MOMENTS * num_ticks, arena)
        return of_ticks(live), max([*live, *(live[moment] + nbytes for moment, nbytes in busy)], default=0)

    def _effect(self, stream: Stream, key: _Key, step: Effects) -> _Effect:
        effect = step.of(stream, *key)
        takes, reads = (self._numbers(step, items) for items in ((*effect.makes, *effect.adds), effect.reads))
        return _Effect(takes, reads, step.workspace(stream, *key))

    def _numbers(self, effects: Effects, items: Iterable[Item]) -> tuple[int, ...]:
        """The numbers of the items that take memory of the device."""
        found = [item for item in items if ITEMS[item.kind].memory == "device"]
        for item in found:
            if item not in self._items:
                self._items[item] = len(self._items)
                storage, nbytes = effects.shared_storage(item), effects.nbytes(item)
                self._nbytes.append(nbytes)
                self._outlives.append(effects.outlives(item))
                self._shared.append(None if storage is None else (storage, item.micro_batch, nbytes))
        return tuple(self._items[item] for item in found)

    def _live(self, starts: dict[int, int], ends: dict[int, int], num_moments: int, arena: int) -> tuple[int, ...]:
        change = [0] * (num_moments + 1)
        change[0] = arena
        shared: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        standing = frozenset(self._standing)
        for item in {**starts, **ends}:
            start = starts.get(item, 0)
            # What nobody reads dies with the op that makes it.
            unread = num_moments - 1 if item in standing else start
            end = num_moments - 1 if self._outlives[item] else ends.get(item, unread)
            storage = self._shared[item]
            if storage is not None:
                shared.setdefault(storage, []).append((start, end))
            else:
                change[start] += self._nbytes[item]
                change[end + 1] -= self._nbytes[item]
        for (_, _, nbytes), spans in shared.items():
            for start, end in union(spans):
                change[start] += nbytes
                change[end + 1] -= nbytes
        return tuple(accumulate(change[:num_moments]))


def _taken_before(computes: Sequence[int], tick: int) -> int:
    """The moment in which memory is taken that a transfer fills: after an op of compute, or the start of the step."""
    earlier = bisect_left(computes, tick)
    return begin_of(computes[earlier - 1], is_brought=True) if earlier else 0
