"""Builder: the table of each plan of a workload."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import NamedTuple

import numpy as np

from megatrain.scheduler.builder.order import (
    HostTicks,
    Rows,
    assign_ticks,
    deferred_updates,
    head_updates,
    place_host,
    written,
)
from megatrain.scheduler.builder.stays import Stay, compute_stages, giants, place_slots, stays_of
from megatrain.scheduler.effects import Effects, Parking, Parks, kind_of
from megatrain.scheduler.items import NO_BLOCK, Stream
from megatrain.scheduler.lifetimes import (
    Books,
    Lifetime,
    OpColumns,
    Spans,
    device_moments,
    live_bytes,
    moved_bytes,
    of_ticks,
    slab_bytes,
)
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Op, Place, Slot, Table, Tick, arena_bytes, host_value_bytes, park_bytes
from megatrain.scheduler.workload import Workload


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices that determine a schedule; those that aren't described are as in `Schedule`.

    Args:
        num_slots: Blocks whose weights may be on the device at the same time.
        resident: Blocks whose weights stay on the device from their forward to their backward, ascending. Of the other
            blocks the last ones, as many as there are slots, do so anyway: at the turn they are there.
        has_giants_alone: Weights that are much larger than most are alone on the device: neither they nor those of
            other blocks come before they are needed, while the others are there.
        has_late_offloads: With several micro-batches, a block's gradients leave during the whole backward of the block
            before it, rather than during that of one micro-batch. They take device memory longer.
    """

    num_slots: int
    keep: int
    saves: tuple[int, ...]
    resident: tuple[int, ...] = ()
    persistent: tuple[int, ...] = ()
    has_giants_alone: bool = False
    has_late_offloads: bool = False
    results: tuple[int, ...] = ()
    recorded: tuple[int, ...] = ()
    device_updates: tuple[int, ...] = ()


def with_late_offloads(plan: Choices, kind: StepKind) -> Choices:
    """The plan with late offloads, if they make a difference."""
    return replace(plan, has_late_offloads=kind.transfer == "copy" and kind.micro_batches > 1 and plan.num_slots > 1)


class _Weights(NamedTuple):
    """Where weights lie, and which updates come before them: that depends on slots and resident blocks alone."""

    head: dict[int, int]
    stays: tuple[Stay, ...]
    slots: tuple[Slot, ...]
    slot_of: tuple[int, ...]


class _SameOps(NamedTuple):
    """The same op of some micro-batches, or of all at once.

    Attributes:
        ticks: Of each.
        slot: That it fills, if it is a `W`.
    """

    stream: Stream
    what: str
    block: int
    ticks: Sequence[int]
    slot: int | None = None


class Builder:
    """Makes the tables of one workload under different plans, each once."""

    def __init__(self, workload: Workload, kind: StepKind) -> None:
        self.workload = workload
        self.kind = kind
        self.stages = compute_stages(workload, kind)
        self._parking = Parking(workload, kind)
        self._steps: dict[tuple[int, ...], Effects] = {}  # by the blocks that the device updates
        self._placed: dict[Hashable, _Weights] = {}
        self._known_ops: dict[Hashable, Sequence[_SameOps]] = {}
        self._columns: dict[Hashable, OpColumns] = {}
        self._bytes: dict[Choices, int] = {}
        self._tables: dict[Choices, Table] = {}

    def device_bytes(self, plan: Choices) -> int:
        """The device bytes of a plan's table, which isn't made for them."""
        if plan not in self._bytes:
            groups, effects = self._ops(plan), self.effects(plan)
            columns = OpColumns.joined([self._columns_of(plan, effects, ops) for ops in groups])
            ticks = np.array([tick for ops in groups for tick in ops.ticks], np.int64)
            of_ops = [ops.stream for ops in groups for _ in ops.ticks]
            spans = Spans(effects, columns, ticks, of_ops, 1 + int(ticks.max(initial=-1)))
            self._bytes[plan] = int(spans.device_moments(arena_bytes(self._place(plan).slots))[1].max(initial=0))
        return self._bytes[plan]

    def _columns_of(self, plan: Choices, effects: Effects, ops: _SameOps) -> OpColumns:
        """What the same op of some micro-batches takes and uses."""
        key = ops[:3], len(ops.ticks), effects.choice(ops.block), plan.device_updates
        if key not in self._columns:
            self._columns[key] = OpColumns.of([effects.known(*ops[:3], number) for number in range(len(ops.ticks))])
        return self._columns[key]

    def table(self, plan: Choices) -> Table:
        """The table of a plan."""
        if plan not in self._tables:
            books = self.books(plan)
            self._tables[plan] = with_figures(books.table, self._parked(plan), books)
        return self._tables[plan]

    def books(self, plan: Choices) -> Books:
        """What the ops of a plan's table do, and its lifetimes."""
        return Books(self._without_figures(plan), effects=self.effects(plan))

    def _without_figures(self, plan: Choices) -> Table:
        return Table(
            ticks=self._ticks_of(self._ops(plan)),
            slots=self._place(plan).slots,
            keep=plan.keep,
            saves=plan.saves,
            live_bytes=(),
            h2d_bytes=0,
            d2h_bytes=0,
            peak_bytes=0,
            device_bytes=0,
            host_bytes=0,
            num_blocks=len(self.workload.blocks),
            kind=self.kind,
            persistent=plan.persistent,
            results=plan.results,
            recorded=plan.recorded,
            device_updates=plan.device_updates,
            workload=self.workload,
        )

    def _parked(self, plan: Choices) -> Parks:
        return self._parking.values(keep=plan.keep, saves=plan.saves, results=plan.results)

    def effects(self, plan: Choices) -> Effects:
        """What each op of a plan's table does."""
        step = self._step(plan.device_updates)
        return step.chosen(plan.saves, plan.results, self._parked(plan), plan.persistent, plan.recorded)

    def _step(self, device_updates: tuple[int, ...]) -> Effects:
        """The effects of steps in which the device updates some blocks, whatever else they choose."""
        if device_updates not in self._steps:
            deferred = deferred_updates(self.workload, self.kind, device_updates)
            parts = self.workload, self.kind, (), (), {}, (), deferred, (), device_updates
            self._steps[device_updates] = Effects(*parts)
        return self._steps[device_updates]

    def _place(self, plan: Choices) -> _Weights:
        chosen = _placing(plan)
        if chosen not in self._placed:
            stays = stays_of(
                self.workload,
                self.kind,
                self.stages,
                num_slots=plan.num_slots,
                resident=frozenset(plan.resident),
                persistent=frozenset(plan.persistent),
                alone=giants(self.workload) if plan.has_giants_alone else (),
                device_updates=frozenset(plan.device_updates),
            )
            loads = [stay.block for stay in stays]
            head = head_updates(self.workload, self._step(plan.device_updates).deferred, loads)
            self._placed[chosen] = _Weights(head, stays, *place_slots(stays))
        return self._placed[chosen]

    def _ops(self, plan: Choices) -> Sequence[_SameOps]:
        """All ops, which don't depend on the graphs that are retained."""
        placed, parked = self._place(plan), self._parked(plan)
        known_by = _placing(plan), plan.has_late_offloads, tuple(parked.items())
        if known_by not in self._known_ops:
            rows = assign_ticks(
                self.workload,
                self.kind,
                self.stages,
                placed.stays,
                parked,
                num_slots=plan.num_slots,
                has_late_offloads=plan.has_late_offloads,
                written=written(self.workload, placed.head),
                device_updates=plan.device_updates,
            )
            host = place_host(self.workload, self.kind, rows.ticks, placed.head)
            loads = zip(placed.stays, placed.slot_of, rows.loads, strict=True)
            found = [_SameOps(Stream.H2D, "W", stay.block, (tick,), slot) for stay, slot, tick in loads]
            self._known_ops[known_by] = [*found, *_other_ops(rows, host)]
        return self._known_ops[known_by]

    def _ticks_of(self, groups: Sequence[_SameOps]) -> tuple[Tick, ...]:
        """The rows."""
        cells: list[list[Op]] = [[] for _ in range(1 + max((ops.ticks[-1] for ops in groups), default=-1))]
        for stream, what, block, ticks, slot in groups:
            per_micro_batch = self.kind.micro_batches > 1 and kind_of(stream, what).per_micro_batch
            for number, tick in enumerate(ticks):
                cells[tick].append(_op(stream, what, block, slot, number if per_micro_batch else None))
        return tuple(Tick(*ops) for ops in cells)


def _placing(plan: Choices) -> Hashable:
    """What the places of weights depend on."""
    return plan.num_slots, plan.resident, plan.persistent, plan.has_giants_alone, plan.device_updates


def with_figures(table: Table, parked: Parks | None = None, books: Books | None = None) -> Table:
    """The table with the places of its gradients and the figures of its header, which follow from its ticks."""
    books = Books(table) if books is None else books
    workload, kind = table.known_workload(), table.kind
    num_ticks = len(table.ticks)
    landing = [life for life in books.lifetimes if life.memory == "landing"]
    places: tuple[Place, ...] = ()
    if kind.transfer == "bind":  # gradients wait where they are made
        waiting = max(live_bytes(landing, num_ticks), default=0)
    else:
        places = place_gradients(life for life in landing if life.item.kind == "landed")
        waiting = max((place.offset + place.nbytes for place in places), default=0)
    moments, needed = device_moments(books)
    live = of_ticks(moments)
    h2d, d2h = moved_bytes(books.ops)
    parks = park_bytes(table, table.parked() if parked is None else parked)
    values = host_value_bytes(workload, kind)
    return replace(
        table,
        live_bytes=live,
        h2d_bytes=h2d,
        d2h_bytes=d2h,
        peak_bytes=max(live, default=0),
        device_bytes=max(needed, default=0),
        host_bytes=parks + waiting + slab_bytes(workload, kind) + values,
        places=places,
    )


def _other_ops(rows: Rows, host: HostTicks) -> Iterator[_SameOps]:
    """All ops but `W`."""
    for stream, what, of_blocks in (
        (Stream.H2D, "A", rows.ticks.restore),
        (Stream.COMPUTE, "F", rows.ticks.forward),
        (Stream.COMPUTE, "B", rows.ticks.backward),
        (Stream.D2H, "A", rows.ticks.park),
    ):
        yield from (_SameOps(stream, what, block, ticks) for block, ticks in of_blocks.items())
    for stream, what, of_block in (
        (Stream.COMPUTE, "U", rows.ticks.update),
        (Stream.D2H, "G", rows.ticks.offload),
        (Stream.D2H, "S", rows.ticks.squares),
        (Stream.HOST, "U", host.update),
        (Stream.HOST, "S", host.squares),
    ):
        yield from (_SameOps(stream, what, block, (tick,)) for block, tick in of_block.items())
    if host.norm is not None:
        yield _SameOps(Stream.HOST, "N", NO_BLOCK, (host.norm,))


# Tables of one workload have most ops in common.
_op = lru_cache(1 << 16)(Op)


def place_gradients(lives: Iterable[Lifetime]) -> tuple[Place, ...]:
    """Gives gradients that land bytes of the host, so that those alive at the same tick don't overlap.

    Places are reused within a step where gradients wait for updates of that step: a `G` waits for each `U` of an
    earlier tick that releases some. First fit, in the order in which gradients arrive. Gradients of the previous step
    use the places of this step's gradients, and a `G` waits for their updates too.
    """
    places: list[Place] = []
    alive: list[tuple[int, int, float]] = []  # first byte, byte after the last, and when it ends; by first byte
    for life in sorted(lives, key=_arrival):
        alive = [other for other in alive if other[2] >= _arrival(life)]
        start = 0
        for low, high, _ in alive:
            if start + life.nbytes <= low:
                break
            start = max(start, high)
        places.append(Place(life.item.number, start, life.nbytes))
        end = max((end.tick for end in life.ends), default=inf)
        alive = sorted([*alive, (start, start + life.nbytes, end)])
    return tuple(sorted(places))


def _arrival(life: Lifetime) -> int:
    assert life.start is not None, life.item
    return life.start.tick
