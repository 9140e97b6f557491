"""Mutations: schedules that differ from a good one in one place, and figures made to fit them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from megatrain.errors import OptionError, ScheduleError
from megatrain.scheduler.effects import streams
from megatrain.scheduler.lifetimes import Books, device_moments, live_bytes, moved_bytes
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import OUTPUTS, UPDATES
from megatrain.scheduler.table import Op, Position, Tick


def with_cells(schedule: Schedule, cells: dict[Position, Op | None]) -> Schedule:
    """The schedule with some cells replaced; below the last row, the table grows."""
    count = max([len(schedule.ticks), *(p.tick + 1 for p in cells)])
    rows = [*schedule.ticks, *[Tick()] * (count - len(schedule.ticks))]
    for position, op in cells.items():
        rows[position.tick] = rows[position.tick].replaced(position.stream, op)
    live = (*schedule.live_bytes, *schedule.live_bytes[-1:] * (count - len(schedule.ticks)))
    return replace(schedule, ticks=tuple(rows), live_bytes=live)


def position(schedule: Schedule, token: str) -> Position:
    """Where the first op of this text is."""
    return next(p for p, op in schedule.positions() if str(op) == token)


def with_moved(schedule: Schedule, ticks: Mapping[str, int | None]) -> Schedule:
    """The schedule with some ops, by their texts, in other rows; or without them, for None."""
    for token, tick in ticks.items():
        at = position(schedule, token)
        moved = {} if tick is None else {Position(tick, at.stream): schedule.ticks[at.tick][at.stream]}
        schedule = with_cells(schedule, {at: None, **moved})
    return schedule


def with_figures(schedule: Schedule) -> Schedule:
    """The schedule with the figures that its table has, so that not only they give it away."""
    try:
        books = Books(schedule)
        on_device = [life for life in books.lifetimes if life.memory == "device"]
        live = live_bytes(on_device, len(schedule.ticks), schedule.arena_bytes)
        h2d, d2h = moved_bytes(books.ops)
        host = _host_figure(schedule, books)
    except (KeyError, ValueError, IndexError, ScheduleError):
        return schedule
    return replace(
        schedule,
        live_bytes=live,
        peak_bytes=max(live, default=0),
        device_bytes=max(device_moments(books)[1], default=0),
        h2d_bytes=h2d,
        d2h_bytes=d2h,
        host_bytes=host,
    )


def _host_figure(schedule: Schedule, books: Books) -> int:
    """What a whole step has; of others no cell of the table changes it."""
    if not schedule.kind.holds_gradients:
        return schedule.host_bytes
    landing = [life for life in books.lifetimes if life.memory == "landing" and schedule.kind.transfer == "bind"]
    waiting = max(live_bytes(landing, len(schedule.ticks)), default=0)
    places = max((place.offset + place.nbytes for place in schedule.places), default=0)
    return waiting + places + schedule.park_bytes + schedule.host_value_bytes


def mutants(schedule: Schedule, random: Random) -> Iterator[tuple[str, Schedule]]:
    """Every op deleted, swapped, moved, renumbered, doubled, put in other slots and streams."""
    ops = list(schedule.positions())
    for index, (position, op) in enumerate(ops):
        mine = [p for p, _ in ops if p.stream == position.stream]
        where = f"{op} of {position.stream} at tick {position.tick}"
        yield f"without {where}", with_cells(schedule, {position: None})
        at = mine.index(position)
        others = {mine[(at + 1) % len(mine)], random.choice(mine)}
        for other in sorted(others - {position}):
            cells: dict[Position, Op | None] = {position: schedule.ticks[other.tick][other.stream], other: op}
            yield f"{where} swapped with tick {other.tick}", with_cells(schedule, cells)
        free = [t for t in range(len(schedule.ticks) + 1) if Position(t, position.stream) not in mine]
        near = [t for t in (position.tick - 1, position.tick + 1) if t in free]
        for tick in sorted({*near, random.choice(free or [position.tick])} - {position.tick}):
            moved = {position: None, Position(tick, position.stream): op}
            yield f"{where} moved to tick {tick}", with_cells(schedule, moved)
        yield from _other_ops(schedule, position, op, where, random)
        if free:
            copied: dict[Position, Op | None] = {Position(random.choice(free), position.stream): op}
            yield f"{where} twice, number {index}", with_cells(schedule, copied)
    yield from _other_headers(schedule, random)


def _other_headers(schedule: Schedule, random: Random) -> Iterator[tuple[str, Schedule]]:
    for name in ("keep", "h2d_bytes", "d2h_bytes", "peak_bytes", "device_bytes", "host_bytes"):
        for change in (-1, 1):
            other = replace(schedule, **{name: getattr(schedule, name) + change})
            yield f"{name} changed by {change}", other
    block = random.randrange(max(1, schedule.num_blocks))
    saves = tuple(sorted(set(schedule.saves) ^ {block}))
    yield f"saves {saves}", replace(schedule, saves=saves)
    results = tuple(sorted(set(schedule.results) ^ {block}))
    yield f"results {results}", with_figures(replace(schedule, results=results))
    persistent = tuple(sorted(set(schedule.persistent) ^ {block}))
    yield f"persistent {persistent}", with_figures(replace(schedule, persistent=persistent))
    there = tuple(sorted(set(schedule.device_updates) ^ {block}))
    yield f"device_updates {there}", with_figures(replace(schedule, device_updates=there))
    for index, slot in enumerate(schedule.slots):
        for offset, nbytes in ((slot.offset + 32, slot.nbytes), (slot.offset, max(0, slot.nbytes - 1))):
            other = replace(slot, offset=offset, nbytes=nbytes)
            slots = (*schedule.slots[:index], other, *schedule.slots[index + 1 :])
            yield f"slot {index} made {other}", replace(schedule, slots=slots)
    yield from _other_kinds(schedule)
    tick = random.randrange(max(1, len(schedule.ticks)))
    live = tuple(n + (t == tick) for t, n in enumerate(schedule.live_bytes))
    yield f"one more live byte at tick {tick}", replace(schedule, live_bytes=live)


def _other_kinds(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    kind = schedule.kind
    changes: list[dict[str, Any]] = [
        *({"updates": updates} for updates in UPDATES),
        *({"outputs": outputs} for outputs in OUTPUTS),
        {"clip": not kind.clip},
        {"reports_norm": not kind.reports_norm},
        *({"micro_batches": count} for count in (kind.micro_batches - 1, kind.micro_batches + 1)),
    ]
    for change in changes:
        try:
            other = replace(kind, **change)
        except OptionError:
            continue  # nobody can make such a kind
        yield f"{change}", replace(schedule, kind=other)


def _other_ops(
    schedule: Schedule, position: Position, op: Op, where: str, random: Random
) -> Iterator[tuple[str, Schedule]]:
    target = random.randrange(schedule.num_blocks + 1)
    if target != op.block and op.what != "N":
        yield f"{where} for block {target}", with_cells(schedule, {position: replace(op, block=target)})
    if op.slot is not None:
        for slot in range(schedule.num_slots + 1):
            if slot != op.slot:
                yield f"{where} into slot {slot}", with_cells(schedule, {position: replace(op, slot=slot)})
    yield from _other_micro_batches(schedule, position, op, where)
    for stream in streams():
        for what in "WAFBGSNUXD":
            slot = op.slot if what == "W" else None
            try:
                changed = Op(stream, what, op.block, slot=slot, micro_batch=op.micro_batch)
            except ScheduleError:
                continue
            if changed != op and (what == op.what or stream == op.stream):
                cells = {position: None, Position(position.tick, stream): changed}
                yield f"{where} made {changed} of {stream}", with_cells(schedule, cells)


def _other_micro_batches(schedule: Schedule, position: Position, op: Op, where: str) -> Iterator[tuple[str, Schedule]]:
    for number in (None, *range(schedule.kind.micro_batches + 1)):
        if number != op.micro_batch and (schedule.kind.micro_batches > 1 or number is not None):
            changed = replace(op, micro_batch=number)
            yield f"{where} made {changed}", with_cells(schedule, {position: changed})
