"""Draft: a schedule as ticks only, which is enough to know its memory, and the rows made from one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.scheduler.builder.host_places import place_gradients
from megatrain.scheduler.builder.host_ticks import HostTicks, head_updates, place_host, written_ticks
from megatrain.scheduler.builder.order import Rows, assign_ticks
from megatrain.scheduler.builder.residency import Residency, compute_stages, place_slots, residencies
from megatrain.scheduler.lifetimes import StepFacts, step_lifetimes
from megatrain.scheduler.memory import (
    accumulated_bytes,
    count_moved,
    live_bytes,
    slab_bytes,
    workspace_bytes,
)
from megatrain.scheduler.op import NO_BLOCK, PER_MICRO_BATCH, STREAMS, Op, Stream
from megatrain.scheduler.parking import park_bytes, parked_values
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Place, Slot, Table, Tick
from megatrain.scheduler.waiting import waiting_bytes
from megatrain.scheduler.workload import Workload


@dataclass(frozen=True, slots=True)
class Plan:
    """The choices that determine a schedule.

    Args:
        num_slots: Blocks whose weights may be on the device at the same time.
        keep: As in `Schedule`.
        saves: As in `Schedule`.
    """

    num_slots: int
    keep: int
    saves: tuple[int, ...]


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

    plan: Plan
    rows: Rows
    host: HostTicks
    live: tuple[int, ...]
    device_bytes: int


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where weights lie, and which updates come before them: that depends on the number of slots alone."""

    head: dict[int, int]
    stays: tuple[Residency, ...]
    slots: tuple[Slot, ...]
    slot_of: tuple[int, ...]


class Builder:
    """Drafts schedules of one workload under different plans, and finishes one."""

    def __init__(self, workload: Workload, kind: StepKind) -> None:
        self.workload = workload
        self.kind = kind
        self.stages = compute_stages(workload, kind)
        self._accumulated = accumulated_bytes(workload)
        self._placed: dict[int, _Placed] = {}

    def draft(self, plan: Plan) -> Draft:
        """Gives the ops ticks and counts the memory."""
        placed = self._place(plan.num_slots)
        parked = self._parked(plan)
        rows = assign_ticks(
            self.workload,
            self.stages,
            placed.stays,
            parked,
            num_slots=plan.num_slots,
            written=written_ticks(self.workload, placed.head),
        )
        host = place_host(self.workload, self.kind, rows.ticks, placed.head)
        facts = StepFacts(rows.ticks, frozenset(plan.saves), parked, self.kind)
        lives = step_lifetimes(self.workload, facts)
        arena = max((slot.offset + slot.nbytes for slot in placed.slots), default=0)
        live = live_bytes(self.workload, lives, max(rows.num_ticks, host.num_ticks), arena)
        return Draft(plan, rows, host, live, max([*live, *self._busy_bytes(rows, live, facts.saves)], default=0))

    def finish(self, draft: Draft) -> Table:
        """Makes the rows, and the figures of the header."""
        placed = self._place(draft.plan.num_slots)
        parked = self._parked(draft.plan)
        ticks = _table(draft, placed, has_micro_batches=self.kind.micro_batches > 1)
        ops = [op for tick in ticks for _, op in tick.ops()]
        places = place_gradients(self.workload, self.kind, _offload(draft), draft.host.update)
        h2d, d2h = count_moved(self.workload, self.kind, ops, parked)
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
            host_bytes=park_bytes(self.workload, self.kind, parked) + self._landing_bytes(draft, places),
            num_blocks=len(self.workload.blocks),
            kind=self.kind,
            places=places,
            workload=self.workload,
        )

    def _busy_bytes(self, rows: Rows, live: Sequence[int], saves: frozenset[int]) -> list[int]:
        work, extra = self.workload, self._accumulated
        return [
            live[tick] + workspace_bytes(work, what, block, saves, extra, micro_batch)
            for what, ticks in (("F", rows.ticks.forward), ("B", rows.ticks.backward))
            for (block, micro_batch), tick in ticks.items()
        ]

    def _landing_bytes(self, draft: Draft, places: Sequence[Place]) -> int:
        """Host bytes of gradients: in their places, in the slab, or where they are made, on the host."""
        if places:
            return max(place.offset + place.nbytes for place in places)
        waiting = waiting_bytes(self.workload, self.kind, _offload(draft), draft.host.update, len(draft.live))
        return waiting + slab_bytes(self.workload, self.kind)

    def _place(self, num_slots: int) -> _Placed:
        if num_slots not in self._placed:
            stays = residencies(self.workload, self.kind, self.stages, num_slots=num_slots)
            loads = [stay.block for stay in stays]
            head = head_updates(self.workload, loads) if self.kind.updates == "deferred" else {}
            self._placed[num_slots] = _Placed(head, stays, *place_slots(stays))
        return self._placed[num_slots]

    def _parked(self, plan: Plan) -> dict[int, tuple[int, ...]]:
        return parked_values(self.workload, self.kind, keep=plan.keep, saves=plan.saves)


def _offload(draft: Draft) -> dict[int, int]:
    return {block: tick for (block, _), tick in draft.rows.ticks.offload.items()}


def _table(draft: Draft, placed: _Placed, *, has_micro_batches: bool) -> tuple[Tick, ...]:
    cells: dict[Stream, dict[int, Op]] = {stream: {} for stream in STREAMS}
    rows = draft.rows.ticks
    for stay, slot, tick in zip(placed.stays, placed.slot_of, draft.rows.loads, strict=True):
        cells[Stream.H2D][tick] = Op(Stream.H2D, "W", stay.block, slot=slot)
    for stream, what, ticks in (
        (Stream.H2D, "A", rows.restore),
        (Stream.COMPUTE, "F", rows.forward),
        (Stream.COMPUTE, "B", rows.backward),
        (Stream.D2H, "A", rows.park),
        (Stream.D2H, "G", rows.offload),
    ):
        has_number = has_micro_batches and what in PER_MICRO_BATCH
        for (block, micro_batch), tick in ticks.items():
            cells[stream][tick] = Op(stream, what, block, micro_batch=micro_batch if has_number else None)
    for block, tick in draft.host.update.items():
        cells[Stream.HOST][tick] = Op(Stream.HOST, "U", block)
    if draft.host.norm is not None:
        cells[Stream.HOST][draft.host.norm] = Op(Stream.HOST, "N", NO_BLOCK)
    return tuple(Tick(*(cells[stream].get(tick) for stream in STREAMS)) for tick in range(len(draft.live)))
