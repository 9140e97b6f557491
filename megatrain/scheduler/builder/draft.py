"""Draft: a schedule as ticks only, which is enough to know its memory, and the rows made from one."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from megatrain.scheduler.builder.account import Account
from megatrain.scheduler.builder.between_ranks import between_ranks
from megatrain.scheduler.builder.bounds.plan_bound import PlanBound
from megatrain.scheduler.builder.host.host_places import place_gradients
from megatrain.scheduler.builder.host.host_ticks import HostTicks, deferred_updates, head_updates, place_host, written
from megatrain.scheduler.builder.order import Rows, assign_ticks
from megatrain.scheduler.builder.rows.row import OpRow, RowEffects, WhatIsKept, weight_rows
from megatrain.scheduler.builder.rows.step_timer import StepTimer
from megatrain.scheduler.builder.stays import Stay, compute_stages, giants, place_slots, stays_of
from megatrain.scheduler.effects import Effects, kind_of
from megatrain.scheduler.items import NO_BLOCK, Stream
from megatrain.scheduler.lifetimes.books import item_lifetimes, moved_bytes, slab_bytes
from megatrain.scheduler.lifetimes.lifetime import live_bytes
from megatrain.scheduler.op import Op
from megatrain.scheduler.parking import Parking, Parks, host_value_bytes, park_bytes
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Position, Slot, Table, Tick
from megatrain.scheduler.workload import Workload


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices that determine a schedule.

    Args:
        num_slots: Blocks whose weights may be on the device at the same time.
        keep: As in `Schedule`.
        saves: As in `Schedule`.
        resident: Blocks whose weights stay on the device from their forward to their backward, ascending. Of the other
            blocks the last ones, as many as there are slots, do so anyway: at the turn they are there.
        persistent: As in `Table`.
        has_giants_alone: Weights that are much larger than most are alone on the device: neither they nor those of
            other blocks come ahead of need while the others are there.
        has_late_offloads: With several micro-batches, a block's gradients leave beside the whole backward of the block
            before it, rather than beside that of one micro-batch. They take device memory longer.
        results: As in `Schedule`.
    """

    num_slots: int
    keep: int
    saves: tuple[int, ...]
    resident: tuple[int, ...] = ()
    persistent: tuple[int, ...] = ()
    has_giants_alone: bool = False
    has_late_offloads: bool = False
    results: tuple[int, ...] = ()


def with_late_offloads(plan: Choices, kind: StepKind) -> Choices:
    """The plan with late offloads, if they make a difference."""
    return replace(plan, has_late_offloads=kind.transfer == "copy" and kind.micro_batches > 1 and plan.num_slots > 1)


@dataclass(frozen=True, slots=True)
class Draft:
    """A schedule whose ops have ticks but no rows yet: enough to know its memory.

    Args:
        plan: What it follows.
        rows: The ticks of all streams but the host.
        host: Those of the host.
        live: Live bytes per tick.
        device_bytes: As in `Schedule`.
    """

    plan: Choices
    rows: Rows
    host: HostTicks
    live: tuple[int, ...]
    device_bytes: int

    @property
    def num_ops(self) -> int:
        """The number of ops but `W` and `C`."""
        return sum(len(row.ticks) for row in _rows(self.rows, self.host))


@dataclass(frozen=True, slots=True)
class _Weights:
    """Where weights lie, and which updates come before them: that depends on slots and resident blocks alone."""

    head: dict[int, int]
    stays: tuple[Stay, ...]
    slots: tuple[Slot, ...]
    slot_of: tuple[int, ...]

    @property
    def arena(self) -> int:
        """Bytes of all slots."""
        return max((slot.offset + slot.nbytes for slot in self.slots), default=0)


class Builder:
    """Drafts schedules of one workload under different plans, and finishes one.

    Args:
        workload: What runs.
        kind: The kind of the step.
    """

    def __init__(self, workload: Workload, kind: StepKind) -> None:
        self.workload = workload
        self.kind = kind
        self.stages = compute_stages(workload, kind)
        self._deferred = deferred_updates(workload, kind)
        self.any_effects = Effects(workload, kind, (), (), {}, (), self._deferred)
        self._items = RowEffects(self.any_effects)
        self._parking = Parking(workload, kind)
        self._account = Account(self._items)
        self._placed: dict[_Placing, _Weights] = {}
        self._known_ticks: dict[Hashable, tuple[Rows, HostTicks, list[OpRow]]] = {}

    def draft(self, plan: Choices) -> Draft:
        """Gives the ops ticks and counts the memory."""
        placed = self._place(plan)
        parked = self._parked(plan)
        rows, host, all_rows = self._ticks(plan, placed, parked)
        live, nbytes = self._account.of(
            all_rows,
            self._items.of(all_rows, self._kept(plan, parked)),
            max(rows.num_ticks, host.num_ticks),
            placed.arena,
        )
        return Draft(plan, rows, host, live, nbytes)

    def _ticks(self, plan: Choices, placed: _Weights, parked: Parks) -> tuple[Rows, HostTicks, list[OpRow]]:
        """The ticks of all ops, which don't depend on the graphs that are retained."""
        known_by = _placing(plan), plan.has_late_offloads, tuple(parked.items())
        if known_by not in self._known_ticks:
            rows = assign_ticks(
                self.workload,
                self.stages,
                placed.stays,
                parked,
                num_slots=plan.num_slots,
                has_late_offloads=plan.has_late_offloads,
                written=written(self.workload, self.kind, placed.head),
            )
            rows = between_ranks(rows, self.kind)
            host = place_host(self.workload, self.kind, rows.ticks, placed.head)
            self._known_ticks[known_by] = rows, host, list(_rows(rows, host))
        return self._known_ticks[known_by]

    def times(self, draft: Draft, timer: StepTimer) -> dict[Stream, list[tuple[float, float]]]:
        """When the ops of each stream begin and end in a simulated step; its table isn't made."""
        placed, plan = self._place(draft.plan), draft.plan
        slots = [placed.slots[slot] for slot in placed.slot_of]
        rows = [*weight_rows(placed.stays, slots, draft.rows.loads), *_rows(draft.rows, draft.host)]
        return timer.times(rows, self._items.of(rows, self._kept(plan, self._parked(plan))), self._items)

    def at_least(self, plan: Choices, bound: PlanBound) -> tuple[float, int]:
        """Seconds and device bytes that a plan takes at least, without its draft."""
        placed, parked = self._place(plan), self._parked(plan)
        seconds = bound.seconds(plan, parked, [stay.block for stay in placed.stays])
        return seconds, bound.device_bytes(plan, parked, placed.arena)

    def finish(self, draft: Draft) -> Table:
        """Makes the rows, and the figures of the header."""
        placed, effects = self._place(draft.plan), self.effects(draft.plan)
        ticks = _table(draft, placed, has_micro_batches=self.kind.micro_batches > 1)
        moves = [(Position(t, op.stream), effects.of(*op.key)) for t, row in enumerate(ticks) for op in row.values()]
        landing = item_lifetimes(effects, moves, "landing")
        places = place_gradients(life for life in landing if life.item.kind == "landed")
        # Where weights are used in place, gradients wait where they are made.
        places = () if self.kind.transfer == "bind" else places
        waiting = max((place.offset + place.nbytes for place in places), default=0)
        if self.kind.transfer == "bind":
            waiting = max(live_bytes(landing, len(draft.live)), default=0)
        h2d, d2h = moved_bytes(moves)
        parks = park_bytes(self.workload, self.kind, effects.parked)
        values = host_value_bytes(self.workload, self.kind)
        return Table(
            ticks=ticks,
            slots=placed.slots,
            keep=draft.plan.keep,
            saves=draft.plan.saves,
            live_bytes=draft.live,
            h2d_bytes=h2d,
            d2h_bytes=d2h,
            peak_bytes=max(draft.live, default=0),
            device_bytes=draft.device_bytes,
            host_bytes=parks + waiting + slab_bytes(self.workload, self.kind) + values,
            num_blocks=len(self.workload.blocks),
            kind=self.kind,
            places=places,
            persistent=draft.plan.persistent,
            results=draft.plan.results,
            workload=self.workload,
        )

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
            )
            loads = [stay.block for stay in stays]
            head = head_updates(self.workload, self._deferred, loads)
            self._placed[chosen] = _Weights(head, stays, *place_slots(stays))
        return self._placed[chosen]

    def effects(self, plan: Choices) -> Effects:
        """What each op of a plan does."""
        kept = plan.saves, plan.results, self._parked(plan), plan.persistent
        return Effects(self.workload, self.kind, *kept, self._deferred)

    def _kept(self, plan: Choices, parked: Parks) -> WhatIsKept:
        return WhatIsKept(
            frozenset(plan.saves),
            frozenset(plan.results),
            parked,
            frozenset(plan.persistent),
            cache(partial(self.effects, plan)),
        )

    def _parked(self, plan: Choices) -> Parks:
        return self._parking.values(keep=plan.keep, saves=plan.saves, results=plan.results)


# What the places of weights depend on.
_Placing = tuple[int, tuple[int, ...], tuple[int, ...], bool]


def _placing(plan: Choices) -> _Placing:
    return plan.num_slots, plan.resident, plan.persistent, plan.has_giants_alone


def _rows(rows: Rows, host: HostTicks) -> Iterator[OpRow]:
    """All ops but `W`."""
    for stream, what, ticks in (
        (Stream.H2D, "A", rows.ticks.restore),
        (Stream.COMPUTE, "F", rows.ticks.forward),
        (Stream.COMPUTE, "B", rows.ticks.backward),
        (Stream.D2H, "A", rows.ticks.park),
    ):
        yield from (OpRow(stream, what, block, of_all) for block, of_all in ticks.items())
    for stream, what, ticks in (
        (Stream.D2H, "G", rows.ticks.offload),
        (Stream.RECEIVE, "R", rows.ticks.receive),
        (Stream.SEND, "P", rows.ticks.send),
        (Stream.HOST, "U", host.update),
        (Stream.PEERS, "V", host.whole),
        (Stream.HOST, "S", host.squares),
    ):
        yield from (OpRow(stream, what, block, (tick,)) for block, tick in ticks.items())
    if host.norm is not None:
        yield OpRow(Stream.HOST, "N", NO_BLOCK, (host.norm,))


def _table(draft: Draft, placed: _Weights, *, has_micro_batches: bool) -> tuple[Tick, ...]:
    cells: list[list[Op]] = [[] for _ in draft.live]
    for stay, slot, tick in zip(placed.stays, placed.slot_of, draft.rows.loads, strict=True):
        cells[tick].append(Op(Stream.H2D, "W", stay.block, slot))
    for stream, what, block, ticks, _ in _rows(draft.rows, draft.host):
        has_number = has_micro_batches and kind_of(stream, what).per_micro_batch
        for number, tick in enumerate(ticks):
            cells[tick].append(Op(stream, what, block, None, number if has_number else None))
    return tuple(Tick(*ops) for ops in cells)
