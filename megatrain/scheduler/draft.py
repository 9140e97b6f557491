"""Draft: a schedule as ticks only, which is enough to know its memory, and the rows made from one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.scheduler.lifetimes import StepFacts, step_lifetimes
from megatrain.scheduler.memory import (
    accumulated_bytes,
    count_moved,
    host_bytes,
    live_bytes,
    workspace_bytes,
)
from megatrain.scheduler.op import Op, Stream
from megatrain.scheduler.order import Rows, assign_ticks
from megatrain.scheduler.parking import parked_values
from megatrain.scheduler.place import Residency, compute_steps, place_slots, residencies
from megatrain.scheduler.table import Schedule, Slot, Tick
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
        rows: The ticks.
        live: Live bytes per tick.
        device_bytes: As in `Schedule`.
    """

    plan: Plan
    rows: Rows
    live: tuple[int, ...]
    device_bytes: int


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where weights lie, which depends on the number of slots alone."""

    stays: tuple[Residency, ...]
    slots: tuple[Slot, ...]
    slot_of: tuple[int, ...]


class Builder:
    """Drafts schedules of one workload under different plans, and finishes one."""

    def __init__(self, workload: Workload, *, mode: str, transfer: str) -> None:
        self.workload = workload
        self.mode = mode
        self.transfer = transfer
        self.steps = compute_steps(workload, mode)
        self._accumulated = accumulated_bytes(workload)
        self._placed: dict[int, _Placed] = {}

    def draft(self, plan: Plan) -> Draft:
        """Gives the ops ticks and counts the memory."""
        placed = self._place(plan.num_slots)
        parked = self._parked(plan)
        rows = assign_ticks(self.workload, self.steps, placed.stays, parked, num_slots=plan.num_slots)
        facts = StepFacts(rows.ticks, frozenset(plan.saves), parked, self.mode)
        lives = step_lifetimes(self.workload, facts)
        arena = max((slot.offset + slot.nbytes for slot in placed.slots), default=0)
        live = live_bytes(self.workload, lives, rows.num_ticks, arena)
        return Draft(plan, rows, live, max([*live, *self._busy_bytes(rows, live, facts.saves)], default=0))

    def finish(self, draft: Draft) -> Schedule:
        """Makes the rows, and the figures of the header."""
        placed = self._place(draft.plan.num_slots)
        parked = self._parked(draft.plan)
        ticks = _table(draft.rows, placed)
        ops = [op for tick in ticks for _, op in tick.ops()]
        h2d, d2h = count_moved(self.workload, ops, parked, self.transfer)
        return Schedule(
            ticks=ticks,
            slots=placed.slots,
            keep=draft.plan.keep,
            saves=draft.plan.saves,
            mode=self.mode,
            transfer=self.transfer,
            live_bytes=draft.live,
            h2d_bytes=h2d,
            d2h_bytes=d2h,
            peak_bytes=max(draft.live, default=0),
            device_bytes=draft.device_bytes,
            host_bytes=host_bytes(self.workload, parked, self.mode, self.transfer),
            num_blocks=len(self.workload.blocks),
            workload=self.workload,
        )

    def _busy_bytes(self, rows: Rows, live: Sequence[int], saves: frozenset[int]) -> list[int]:
        work, extra = self.workload, self._accumulated
        return [
            live[tick] + workspace_bytes(work, what, block, saves, extra)
            for what, ticks in (("F", rows.ticks.forward), ("B", rows.ticks.backward))
            for block, tick in ticks.items()
        ]

    def _place(self, num_slots: int) -> _Placed:
        if num_slots not in self._placed:
            stays = residencies(self.workload, self.steps, num_slots=num_slots, transfer=self.transfer)
            self._placed[num_slots] = _Placed(stays, *place_slots(stays))
        return self._placed[num_slots]

    def _parked(self, plan: Plan) -> dict[int, tuple[int, ...]]:
        return parked_values(self.workload, keep=plan.keep, saves=plan.saves, mode=self.mode, transfer=self.transfer)


def _table(rows: Rows, placed: _Placed) -> tuple[Tick, ...]:
    h2d: dict[int, Op] = {}
    compute: dict[int, Op] = {}
    d2h: dict[int, Op] = {}
    for stay, slot, tick in zip(placed.stays, placed.slot_of, rows.loads, strict=True):
        h2d[tick] = Op(Stream.H2D, "W", stay.block, slot=slot)
    for column, what, ticks in (
        (h2d, "A", rows.ticks.restore),
        (compute, "F", rows.ticks.forward),
        (compute, "B", rows.ticks.backward),
        (d2h, "A", rows.ticks.park),
        (d2h, "G", rows.ticks.offload),
    ):
        stream = Stream.H2D if column is h2d else Stream.COMPUTE if column is compute else Stream.D2H
        for block, tick in ticks.items():
            column[tick] = Op(stream, what, block)
    return tuple(Tick(h2d.get(t), compute.get(t), d2h.get(t)) for t in range(rows.num_ticks))
