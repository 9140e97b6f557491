"""row_waits(): for each op of a plan, the ops of other streams that it waits for, worked out row by row.

The same dependencies as `dependency.all_waits` finds in a table, but those that the order of a stream implies; a
simulated step is the same.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from math import inf

from megatrain.scheduler.builder.rows.row import OpRow, RowEffect, RowEffects
from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Slot

Waits = list[list[tuple[Stream, int]]]
"""Of each op of a row: the streams and ticks of ops that it waits for."""
# Rows with the ticks of those of their ops that concern an item.
_Ticks = list[tuple[int, Sequence[int]]]


def row_waits(rows: Sequence[OpRow], effects: Sequence[RowEffect], items: RowEffects) -> list[Waits]:
    """Returns the waits of each row.

    Args:
        rows: Of all ops of a plan.
        effects: Of each row.
        items: Describes the items.
    """
    found: list[Waits] = [[[] for _ in row.ticks] for row in rows]
    _add_waits_of_each(found, rows, effects)
    _add_waits_for_one(found, rows, effects, items)
    _add_memory_waits(found, rows, effects, items)
    return found


def _add_waits_of_each(found: list[Waits], rows: Sequence[OpRow], effects: Sequence[RowEffect]) -> None:
    """What each micro-batch has: its op that reads waits for that which makes, and one that overwrites for readers."""
    makers: dict[int, list[int]] = {}
    away: set[int] = set()  # items that another stream than compute makes
    for number, (row, effect) in enumerate(zip(rows, effects, strict=True)):
        for item in (*effect.makes, *effect.adds):
            makers.setdefault(item, []).append(number)
            if row.stream != Stream.COMPUTE:
                away.add(item)
    for number, (row, effect) in enumerate(zip(rows, effects, strict=True)):
        # Compute waits for no compute.
        away_from = away if row.stream == Stream.COMPUTE else makers
        for item in effect.reads:
            for other in makers[item] if item in away_from else ():
                if rows[other].stream != row.stream:
                    _pair(found[number], row, found[other], rows[other], overwrites=item in effects[other].makes)


def _pair(waits: Waits, reader: OpRow, other_waits: Waits, maker: OpRow, *, overwrites: bool) -> None:
    for number, (read, made) in enumerate(zip(reader.ticks, maker.ticks, strict=True)):
        if made < read:
            waits[number].append((maker.stream, made))
        elif read < made and overwrites:
            other_waits[number].append((reader.stream, read))


def _add_waits_for_one(
    found: list[Waits], rows: Sequence[OpRow], effects: Sequence[RowEffect], items: RowEffects
) -> None:
    """What exists once: who reads waits for the last that made it, and for those that have added to it since."""
    makers, adders, readers = dict[int, _Ticks](), dict[int, _Ticks](), dict[int, _Ticks]()
    for number, (row, effect) in enumerate(zip(rows, effects, strict=True)):
        for part, users in (
            (effect.makes_once, makers),
            (effect.adds_once, adders),
            (effect.reads_once, readers),
        ):
            for item, ops in part:
                ticks = row.ticks if len(ops) == len(row.ticks) else [row.ticks[op] for op in ops]
                users.setdefault(item, []).append((number, ticks))
    for item, reading in readers.items():
        making, adding = makers.get(item, []), adders.get(item, [])
        if not making and not adding:
            continue
        versions = sorted(tick for _, ticks in making for tick in ticks)
        for number, ticks in reading:
            _wait_for_makers(found[number], rows, number, ticks, versions, [*making, *adding])
    _add_overwriting_waits(found, rows, makers, readers, items)


def _wait_for_makers(
    waits: Waits, rows: Sequence[OpRow], number: int, ticks: Sequence[int], versions: Sequence[int], makers: _Ticks
) -> None:
    """Lets ops that read wait for the last version, and for what was added to it."""
    row = rows[number]
    at = {tick: place for place, tick in enumerate(row.ticks)}
    known: tuple[int, int] | None = None
    for tick in ticks:
        place = bisect_left(versions, tick)
        added = sum(bisect_left(made, tick) for _, made in makers)
        if known == (place, added):
            continue  # the op before it has waited for the same
        known = place, added
        since = versions[place - 1] if place else -1
        for other, made in makers:
            latest = bisect_left(made, tick)
            if rows[other].stream != row.stream and latest and made[latest - 1] >= since:
                waits[at[tick]].append((rows[other].stream, made[latest - 1]))


def _add_overwriting_waits(
    found: list[Waits], rows: Sequence[OpRow], makers: dict[int, _Ticks], readers: dict[int, _Ticks], items: RowEffects
) -> None:
    """What is overwritten was read before: weights in the bytes of a slot, all else where it is."""
    filling: list[tuple[int, int, int]] = []
    for item, making in makers.items():
        if items.weights[item] is not None:
            filling += [(tick, number, item) for number, ticks in making for tick in ticks]
            continue
        reading = _by_stream(rows, readers.get(item, []))
        versions = sorted(tick for _, ticks in making for tick in ticks)
        for number, ticks in making if reading else ():
            at = {tick: place for place, tick in enumerate(rows[number].ticks)}
            for tick in ticks:
                earlier = bisect_left(versions, tick)
                since = versions[earlier - 1] if earlier else -1
                found[number][at[tick]] += _last_reads(reading, rows[number].stream, since, tick - 1)
    filling.sort(key=lambda each: each[0])
    _add_slot_waits(
        found, rows, filling, {item: _by_stream(rows, readers.get(item, [])) for _, _, item in filling}, items
    )


def _add_slot_waits(
    found: list[Waits],
    rows: Sequence[OpRow],
    filling: Sequence[tuple[int, int, int]],
    reading: dict[int, dict[Stream, list[int]]],
    items: RowEffects,
) -> None:
    """Weights come into bytes whose former contents were read.

    Args:
        found: To which waits are added.
        rows: Of all ops.
        filling: Tick, row and item of the ops that fill slots, in their order.
        reading: When items are read, by stream.
        items: Describes the items.
    """
    versions: dict[int, list[int]] = {}
    for tick, _, item in filling:
        versions.setdefault(item, []).append(tick)
    lying: list[tuple[int, int, int, int]] = []  # bytes, item, and the tick of its version
    for tick, number, item in filling:
        start, stop = _span(rows[number], items.state_bytes[rows[number].block])
        rest: list[tuple[int, int, int, int]] = []
        for low, high, other, since in lying:
            if low < stop and start < high:
                following = bisect_right(versions[other], since)
                until = versions[other][following] if following < len(versions[other]) else inf
                limit = int(min(until, tick - 1))
                found[number][0] += _last_reads(reading[other], rows[number].stream, since, limit)
            else:
                rest.append((low, high, other, since))
        lying = [*rest, (start, stop, item, tick)]


def _span(row: OpRow, nbytes: int) -> tuple[int, int]:
    slot = row.slot
    assert isinstance(slot, Slot), "weights fill a slot"
    return slot.offset, slot.offset + nbytes


def _by_stream(rows: Sequence[OpRow], users: _Ticks) -> dict[Stream, list[int]]:
    """The ticks of ops, ascending, by stream."""
    found: dict[Stream, list[int]] = {}
    for number, ticks in users:
        found.setdefault(rows[number].stream, []).extend(ticks)
    for ticks in found.values():
        ticks.sort()
    return found


def _last_reads(
    reading: dict[Stream, list[int]], stream: Stream, since: int, limit: int
) -> Iterable[tuple[Stream, int]]:
    """The last op of each other stream, behind one tick and not behind another."""
    for other, ticks in reading.items():
        latest = bisect_right(ticks, limit)
        if other != stream and latest and ticks[latest - 1] > since:
            yield other, ticks[latest - 1]


def _add_memory_waits(
    found: list[Waits], rows: Sequence[OpRow], effects: Sequence[RowEffect], items: RowEffects
) -> None:
    """Who takes memory waits for the last op of earlier ticks that releases some.

    Compute takes that of the device: what a transfer brings lies in memory that the op of compute before it took.
    """
    computes = sorted(tick for row in rows if row.stream == Stream.COMPUTE for tick in row.ticks)
    of_device, of_landing = (_releases(rows, effects, items, memory) for memory in ("device", "landing"))
    for waits, row, effect in zip(found, rows, effects, strict=True):
        if row.stream == Stream.COMPUTE:
            _wait_for_last(waits, row, of_device)
            continue
        made = [*effect.makes, *effect.adds, *(item for item, _ in (*effect.makes_once, *effect.adds_once))]
        if any(items.memory[item] == "device" for item in made):
            _wait_for_last(waits, row, {Stream.COMPUTE: computes})
        if any(items.memory[item] == "landing" for item in made):
            _wait_for_last(waits, row, of_landing)


def _wait_for_last(waits: Waits, row: OpRow, others: dict[Stream, list[int]]) -> None:
    for stream, ticks in others.items():
        if stream != row.stream:
            for waiting, tick in zip(waits, row.ticks, strict=True):
                earlier = bisect_left(ticks, tick)
                if earlier:
                    waiting.append((stream, ticks[earlier - 1]))


def _releases(
    rows: Sequence[OpRow], effects: Sequence[RowEffect], items: RowEffects, memory: str
) -> dict[Stream, list[int]]:
    """The ticks of the ops with which items end that don't outlive the step: the last of each stream."""
    last: dict[tuple[int, Stream], list[int]] = {}
    found: dict[Stream, list[int]] = {}
    for row, effect in zip(rows, effects, strict=True):
        if memory == "device" and row.stream == Stream.COMPUTE:
            continue  # all of compute releases its workspace
        if memory == "device" and row.stream == Stream.SEND:
            found.setdefault(row.stream, []).extend(row.ticks)  # see `Uses`
            continue
        for item in effect.reads:
            if items.memory[item] == memory and not items.outlives[item]:
                before = last.get((item, row.stream))
                ticks = list(row.ticks)
                last[item, row.stream] = ticks if before is None else list(map(max, before, ticks))
        for item, ops in effect.reads_once:
            if items.memory[item] == memory and not items.outlives[item]:
                before = last.get((item, row.stream), [-1])
                last[item, row.stream] = [max(before[0], row.ticks[ops[-1]])]
    for (_, stream), ticks in last.items():
        found.setdefault(stream, []).extend(ticks)
    for ticks in found.values():
        ticks.sort()
    return found
