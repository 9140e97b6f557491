"""StepTimer: how long the step of a draft takes, without its table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.rows.row import OpRow, RowEffect, RowEffects
from megatrain.scheduler.builder.rows.row_waits import row_waits
from megatrain.scheduler.items import Stream
from megatrain.scheduler.timing.costs import OpSeconds
from megatrain.scheduler.timing.shared import QueuedOp, run_queues


class _TimedOp(NamedTuple):
    tick: int
    seconds: float
    waits: list[tuple[Stream, int]]


class StepTimer:
    """Simulates the steps of drafts on a machine, to the bit as `simulate` does those of their tables.

    Args:
        machine: The machine.
    """

    def __init__(self, machine: Hardware) -> None:
        self._machine = machine
        self._op_seconds = OpSeconds(machine)
        self._known: dict[RowEffect, tuple[float, ...]] = {}

    def times(
        self, rows: Sequence[OpRow], effects: Sequence[RowEffect], items: RowEffects
    ) -> dict[Stream, list[tuple[float, float]]]:
        """When the ops of each stream begin and end, in seconds, in their order.

        Args:
            rows: Of all ops of a draft.
            effects: Of each row.
            items: Describes the items.
        """
        ops: dict[Stream, list[_TimedOp]] = {}
        for row, effect, waits in zip(rows, effects, row_waits(rows, effects, items), strict=True):
            ops.setdefault(row.stream, []).extend(map(_TimedOp, row.ticks, self._seconds(row, effect), waits))
        queues = {stream: _in_order(queue) for stream, queue in ops.items()}
        return run_queues(queues, self._machine) if self._machine.is_shared else _alone(queues)

    def _seconds(self, row: OpRow, effect: RowEffect) -> tuple[float, ...]:
        if effect not in self._known:
            self._known[effect] = tuple(self._op_seconds.of(row.stream, each) for each in effect.effects)
        return self._known[effect]


def _in_order(ops: list[_TimedOp]) -> list[QueuedOp]:
    """The queue of a stream, without waits for what an op before has waited for."""
    waited: dict[Stream, int] = {}
    queue: list[QueuedOp] = []
    for tick, seconds, waits in sorted(ops):
        new: list[tuple[Stream, int]] = []
        for stream, before in waits:
            if before > waited.get(stream, -1):
                waited[stream] = before
                new.append((stream, before))
        queue.append(QueuedOp(tick, seconds, new))
    return queue


def _alone(queues: dict[Stream, list[QueuedOp]]) -> dict[Stream, list[tuple[float, float]]]:
    """As `run_queues`, where streams don't slow each other down."""
    times: dict[Stream, list[tuple[float, float]]] = {stream: [] for stream in queues}
    free = dict.fromkeys(queues, 0.0)
    ends: dict[tuple[Stream, int], float] = {}
    for op, stream in sorted(((op, stream) for stream, queue in queues.items() for op in queue), key=_tick):
        start = max([free[stream], *(ends[wait] for wait in op.waits)])
        free[stream] = ends[stream, op.tick] = start + op.seconds
        times[stream].append((start, free[stream]))
    return times


def _tick(queued: tuple[QueuedOp, Stream]) -> int:
    return queued[0].tick
