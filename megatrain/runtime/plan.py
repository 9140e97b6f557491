"""Plan: a schedule made ready to run, with everything an operation needs looked up beforehand."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatrain.errors import ScheduleError
from megatrain.scheduler.builder.build import backward_schedule
from megatrain.scheduler.lifetimes import lifetimes
from megatrain.scheduler.op import Op, Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.table import Position


class Release(NamedTuple):
    """Something of a micro-batch to let go of.

    `"value"`, `"gradient"` and `"original"` (a value on the device that was parked) have the number of a value,
    `"parameters"` (gradients of a block's parameters) and `"saved"` (a retained graph) that of a block.
    """

    kind: str
    number: int
    micro_batch: int = 0


@dataclass(frozen=True, slots=True)
class Planned:
    """One operation of the table and what happens around it.

    Args:
        position: Its place in the table.
        op: What it does.
        waits: Operations of other streams it waits for.
        slot: Slot that holds the block's state for an F or B; None if the block has no state.
        values: Values that an A moves, by index.
        saves: An F that retains its graph.
        is_recomputed: An F that its B will repeat.
        is_turn: The first B of its micro-batch: the caller hands in the gradients of the outputs.
        released_before: Items to let go of once its waits are over: transfers had the last use of them.
        released_after: Items whose last use it is.
        freed_ranges: `(offset, bytes)` in the arena of the states that it reads last.
    """

    position: Position
    op: Op
    waits: tuple[Position, ...]
    slot: int | None
    values: tuple[int, ...]
    saves: bool
    is_recomputed: bool
    is_turn: bool
    released_before: tuple[Release, ...]
    released_after: tuple[Release, ...]
    freed_ranges: tuple[tuple[int, int], ...]

    @property
    def micro_batch(self) -> int:
        """Whose operation it is; what concerns all micro-batches counts as the first's."""
        return self.op.micro_batch or 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The operations of one schedule, split where the caller gets the model's outputs.

    Args:
        forward: Everything up to the tick of the last F; nothing of a whole step, which isn't split.
        backward: The rest.
        forward_ends: Items to let go of when the forward half is over.
        backward_ends: The same for the backward half.
        arena_bytes: Size of the device arena.
        parked_values: All values that are parked, by index.
    """

    forward: tuple[Planned, ...]
    backward: tuple[Planned, ...]
    forward_ends: tuple[Release, ...]
    backward_ends: tuple[Release, ...]
    arena_bytes: int
    parked_values: tuple[int, ...]


def plan_schedule(schedule: Schedule) -> Plan:
    """Looks up waits, slots and releases of every operation of the schedule of a call.

    Raises:
        ScheduleError: If it is of a whole training step, which `StepExecutor` runs.
    """
    if schedule.kind.is_training_step:
        raise ScheduleError(
            "the schedule is of a whole training step.\n"
            "  An Executor runs one call: a forward and its backward; updates are the caller's.\n"
            "  Build it without micro_batches, updates, clip and outputs, or run it by a TrainStep."
        )
    return _planned(schedule, max((p.tick for p, op in schedule.positions() if op.what == "F"), default=-1))


def plan_step(schedule: Schedule) -> Plan:
    """Looks up the same of a whole training step."""
    return _planned(schedule, -1)


def _planned(schedule: Schedule, last_forward: int) -> Plan:
    releases = _Releases(schedule, last_forward)
    waits, bindings, parked = schedule.waits(), schedule.bindings(), schedule.parked()
    slot_of = {position: op.slot for position, op in schedule.positions()}
    freed = _freed_ranges(schedule)
    backwards = [(position, op) for position, op in schedule.positions() if op.what == "B"]
    recomputed = {op.block for _, op in backwards}.difference(schedule.saves)
    turns = {op.micro_batch: position for position, op in reversed(backwards)}
    steps = tuple(
        Planned(
            position=position,
            op=op,
            waits=waits.get(position, ()),
            slot=slot_of[bindings[position]] if position in bindings else None,
            values=parked.get(op.block, ()) if op.what == "A" else (),
            saves=op.what == "F" and op.block in schedule.saves,
            is_recomputed=op.what == "F" and op.block in recomputed,
            is_turn=turns.get(op.micro_batch) == position,
            released_before=tuple(releases.before[position]),
            released_after=tuple(releases.after[position]),
            freed_ranges=tuple(freed[position]),
        )
        for position, op in schedule.positions()
    )
    return Plan(
        forward=tuple(s for s in steps if s.position.tick <= last_forward),
        backward=tuple(s for s in steps if s.position.tick > last_forward),
        forward_ends=tuple(releases.forward_ends),
        backward_ends=tuple(releases.backward_ends),
        arena_bytes=schedule.arena_bytes,
        parked_values=tuple(v for values in parked.values() for v in values),
    )


class _Releases:
    """Decides where each item is let go of.

    What a compute operation uses last goes right after it. What a transfer uses last goes before whatever takes
    device memory first in a later tick, a compute operation or a returning activation: both wait for that transfer,
    so freed memory is reused in stream order, and is free when the table says so. The two may run side by side, so
    the item stands before both and letting go a second time does nothing.
    """

    def __init__(self, schedule: Schedule, last_forward: int):
        self.before: dict[Position, list[Release]] = defaultdict(list)
        self.after: dict[Position, list[Release]] = defaultdict(list)
        self.forward_ends: list[Release] = []
        self.backward_ends: list[Release] = []
        self._last_forward = last_forward
        self._compute = [p for p, _ in schedule.positions() if p.stream == Stream.COMPUTE]
        self._returns = [p for p, op in schedule.positions() if p.stream == Stream.H2D and op.what == "A"]
        returns, parked = set(self._returns), {v for values in schedule.parked().values() for v in values}
        for life in lifetimes(schedule):
            kind, number = life.item
            has_left = kind == "value" and number in parked and life.start not in returns
            if life.ends:
                self._place(Release("original" if has_left else kind, number, life.micro_batch), life.ends)

    def _place(self, item: Release, ends: Sequence[Position]) -> None:
        last_compute = max((p.tick for p in ends if p.stream == Stream.COMPUTE), default=-1)
        last_transfer = max((p.tick for p in ends if p.stream != Stream.COMPUTE), default=-1)
        if last_compute > last_transfer:
            self.after[Position(last_compute, Stream.COMPUTE)].append(item)
            return
        is_forward = last_transfer <= self._last_forward
        last_tick = self._last_forward if is_forward else float("inf")
        for takers in (self._compute, self._returns):
            first = bisect_right(takers, last_transfer, key=lambda p: p.tick)
            if first < len(takers) and takers[first].tick <= last_tick:
                self.before[takers[first]].append(item)
        (self.forward_ends if is_forward else self.backward_ends).append(item)


def _freed_ranges(schedule: Schedule) -> dict[Position, list[tuple[int, int]]]:
    """Per compute operation: the parts of the arena whose state it is the last to read."""
    last_reader: dict[Position, Position] = {}
    for reader, load in schedule.bindings().items():
        last_reader[load] = max(last_reader.get(load, reader), reader)
    blocks = schedule.known_workload().blocks
    slot_of = {position: op for position, op in schedule.positions()}
    freed: dict[Position, list[tuple[int, int]]] = defaultdict(list)
    for load, reader in last_reader.items():
        op = slot_of[load]
        assert op.slot is not None
        freed[reader].append((schedule.slots[op.slot].offset, blocks[op.block].state_bytes))
    return freed


def cold_schedule(warm: Schedule) -> Schedule:
    """The backward alone, checked, in the memory that `warm` takes if possible."""
    try:
        cold = backward_schedule(warm, memory=warm.device_bytes)
    except ScheduleError:
        cold = backward_schedule(warm, num_slots=1)
    cold.check()
    return cold
