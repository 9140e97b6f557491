"""Device memory of a step: live bytes per tick, workspace, and what stands in a schedule's header."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatrain.scheduler.lifetimes import Lifetime
from megatrain.scheduler.op import Op, Stream
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Table
from megatrain.scheduler.workload import Workload

# What lies in the storage of a value; gradients have their own.
_OF_VALUES = ("value", "original")


def live_bytes(workload: Workload, lives: Sequence[Lifetime], num_ticks: int, arena_bytes: int) -> tuple[int, ...]:
    """Bytes that exist at any moment of each tick: from the tick of `start` to the last of `ends`, inclusive.

    That bounds what exists at run time, whatever the timing, because an op that allocates waits for the ops
    of earlier ticks that release (the "memory" edges of the dependency graph). So things that exist at the
    same moment pairwise share a tick, and intervals that pairwise meet have a tick in common.
    """
    change = [0] * (num_ticks + 1)
    change[0] = arena_bytes
    shared: dict[tuple[int, int], list[tuple[int, int]]] = {}
    sharers = _sharers(workload)
    for life in lives:
        start, end = span(life, num_ticks)
        storage = workload.values[life.item.number].storage if life.item.kind in _OF_VALUES else -1
        if storage >= 0 and sharers[storage] > 1:
            shared.setdefault((storage, life.item.micro_batch), []).append((start, end))
        else:
            change[start] += life.nbytes
            change[end + 1] -= life.nbytes
    for (storage, _), spans in shared.items():
        for start, end in _union(spans):
            change[start] += workload.storages[storage]
            change[end + 1] -= workload.storages[storage]
    return tuple(accumulate(change[:num_ticks]))


def span(life: Lifetime, num_ticks: int) -> tuple[int, int]:
    """First and last tick of a lifetime, both inclusive."""
    start = 0 if life.start is None else life.start.tick
    return start, max((end.tick for end in life.ends), default=num_ticks - 1)


def _sharers(workload: Workload) -> list[int]:
    count = [0] * len(workload.storages)
    for value in workload.values:
        count[value.storage] += 1
    return count


def _union(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def accumulated_bytes(workload: Workload) -> list[int]:
    """Per block, bytes of the gradients that its backward adds to ones that exist already.

    The summand exists beside the sum for a moment. The first to hand in a gradient adds nothing.
    """
    found = [0] * len(workload.blocks)
    for index, value in enumerate(workload.values):
        if workload.has_value_gradient(index):
            readers = workload.backward_readers(index)
            for block in readers if value.is_output else readers[:-1]:
                found[block] += value.nbytes
    return found


def workspace_bytes(
    workload: Workload,
    what: str,
    block: int,
    saves: Collection[int],
    accumulated: Sequence[int],
    micro_batch: int = 0,
) -> int:
    """Bytes that an F or B takes while it runs, beyond what has a lifetime.

    The workspace of a backward was measured with its recompute, whose saved values are part of it. Of a
    retained graph they are live already and not counted twice. Later micro-batches make gradients of the parameters
    beside the sum of those before.
    """
    work = workload.blocks[block]
    if what == "F":
        return work.forward_workspace_bytes
    saved = work.saved_bytes if block in saves else 0
    summand = work.gradient_bytes if micro_batch > 0 else 0
    return max(0, work.backward_workspace_bytes - saved) + accumulated[block] + summand


def op_bytes(workload: Workload, kind: StepKind, op: Op, parked: Mapping[int, Sequence[int]]) -> int:
    """Bytes that an op moves between host and device."""
    if kind.transfer == "bind" or op.what not in "WAG":
        return 0
    if op.what == "A":
        return sum(workload.values[v].nbytes for v in parked.get(op.block, ()))
    work = workload.blocks[op.block]
    return work.state_bytes if op.what == "W" else work.gradient_bytes


def slab_bytes(workload: Workload, kind: StepKind) -> int:
    """Host bytes through which gradients go to the caller: as many as the largest gradients of a block take.

    There is no slab where gradients wait on the host, and where they are used where they are made.
    """
    if kind.transfer == "bind" or kind.mode == "forward" or kind.holds_gradients:
        return 0
    return max((block.landing_bytes for block in workload.blocks if block.has_backward), default=0)


@dataclass(frozen=True, slots=True)
class Peak:
    """The tick that needs most device memory, and what it is made of.

    Args:
        tick: The first such tick.
        op: Its F or B, or another op of it if there is none.
        parts: Bytes by kind, none of them zero, largest first; they add up to the schedule's `device_bytes`.
    """

    tick: int
    op: Op | None
    parts: tuple[tuple[str, int], ...]


_PART_NAMES = {
    "value": "activations",
    "original": "activations",
    "gradient": "gradients of activations",
    "parameters": "gradients of parameters",
    "saved": "retained graphs",
}


def find_peak(schedule: Table, lives: Sequence[Lifetime]) -> Peak:
    """Says at which tick a schedule needs `device_bytes`, and for what."""
    workload = schedule.known_workload()
    accumulated = accumulated_bytes(workload)

    def workspace(tick: int) -> int:
        op = schedule.ticks[tick].compute
        if op is None:
            return 0
        return workspace_bytes(workload, op.what, op.block, schedule.saves, accumulated, op.micro_batch or 0)

    tick = max(range(len(schedule.ticks)), key=lambda t: (schedule.live_bytes[t] + workspace(t), -t))
    parts = {"weights": schedule.arena_bytes, "workspace": workspace(tick)}
    storages: set[tuple[int, int]] = set()
    for life in lives:
        start, end = span(life, len(schedule.ticks))
        if not start <= tick <= end:
            continue
        if life.item.kind in _OF_VALUES:
            storage = workload.values[life.item.number].storage, life.item.micro_batch
            if storage in storages:
                continue
            storages.add(storage)
        name = _PART_NAMES[life.item.kind]
        parts[name] = parts.get(name, 0) + life.nbytes
    row = schedule.ticks[tick]
    ordered = sorted((p for p in parts.items() if p[1] > 0), key=lambda p: -p[1])
    return Peak(tick, row.compute or row.d2h or row.h2d, tuple(ordered))


def count_moved(
    workload: Workload, kind: StepKind, ops: Sequence[Op], parked: Mapping[int, Sequence[int]]
) -> tuple[int, int]:
    """Bytes copied to the device and to the host."""
    moved = {Stream.H2D: 0, Stream.D2H: 0}
    for op in ops:
        if op.stream in moved:
            moved[op.stream] += op_bytes(workload, kind, op, parked)
    return moved[Stream.H2D], moved[Stream.D2H]
