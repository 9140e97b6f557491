"""Lifetimes: from which op to which each tensor of a step exists on the device.

Both the accounting of memory and the runtime follow these; the checker derives its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatrain.scheduler.op import Stream
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Position, Table
from megatrain.scheduler.workload import Workload

# A block and a micro-batch.
Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class OpTicks:
    """The tick of each op but `W`, by block and micro-batch; `G` counts as one of micro-batch 0."""

    forward: dict[Run, int] = field(default_factory=dict[Run, int])
    backward: dict[Run, int] = field(default_factory=dict[Run, int])
    park: dict[Run, int] = field(default_factory=dict[Run, int])
    restore: dict[Run, int] = field(default_factory=dict[Run, int])
    offload: dict[Run, int] = field(default_factory=dict[Run, int])


class Item(NamedTuple):
    """Something of one micro-batch that takes device memory.

    `"value"`, `"original"` (a value that is parked, until it has left the device) and `"gradient"` have the number of
    a value; `"parameters"` (gradients of a block's parameters) and `"saved"` (a retained graph) that of a block.

    The gradients of a block's parameters, of which there is one sum, count as those of micro-batch 0.
    """

    kind: str
    number: int
    micro_batch: int = 0


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One life of an item, between two moments.

    Args:
        item: What lives.
        nbytes: Device bytes. For a value the bytes of its storage, which aliases share and which counts once;
            after a return, and for gradients, the bytes of the value itself.
        start: The op that makes it; None if it exists when the step begins.
        ends: The item is released when all these ops are done; empty if it outlives the step.
    """

    item: Item
    nbytes: int
    start: Position | None
    ends: tuple[Position, ...]


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What lifetimes depend on besides the workload.

    Args:
        ticks: Where each op stands.
        saves: Blocks whose graph is retained.
        parked: Values parked by each block's `A`.
        kind: As in `Schedule`.
    """

    ticks: OpTicks
    saves: frozenset[int]
    parked: Mapping[int, Sequence[int]]
    kind: StepKind


def lifetimes(schedule: Table) -> tuple[Lifetime, ...]:
    """All lifetimes of a schedule: values by index, then gradients, then those of the blocks.

    Raises:
        ScheduleError: If the schedule doesn't know its workload.
    """
    facts = StepFacts(op_ticks(schedule), frozenset(schedule.saves), schedule.parked(), schedule.kind)
    return step_lifetimes(schedule.known_workload(), facts)


def op_ticks(schedule: Table) -> OpTicks:
    """The ticks of the ops of a table, those of `W` and of the host aside; of an op that recurs, the last."""
    found = OpTicks()
    rows = {
        (Stream.COMPUTE, "F"): found.forward,
        (Stream.COMPUTE, "B"): found.backward,
        (Stream.D2H, "A"): found.park,
        (Stream.H2D, "A"): found.restore,
        (Stream.D2H, "G"): found.offload,
    }
    for position, op in schedule.positions():
        if (op.stream, op.what) in rows:
            rows[op.stream, op.what][op.block, op.micro_batch or 0] = position.tick
    return found


def step_lifetimes(workload: Workload, facts: StepFacts) -> tuple[Lifetime, ...]:
    """The same as `lifetimes`, for a table in the making."""
    parked_by = {value: block for block, values in facts.parked.items() for value in values}
    found: list[Lifetime] = []
    for micro_batch in range(facts.kind.micro_batches):
        uses = _uses_of(facts, micro_batch)
        for value in range(len(workload.values)):
            found += _value_lives(workload, uses, value, parked_by.get(value))
        if facts.kind.mode != "forward":
            for value in range(len(workload.values)):
                found += _gradient_lives(workload, uses, value)
        for block in uses.backward:
            found += _block_lives(workload, facts, uses, block)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Uses:
    """The ticks of one micro-batch, by block, and what of `StepFacts` concerns it."""

    micro_batch: int
    mode: str
    saves: frozenset[int]
    forward: Mapping[int, int]
    backward: Mapping[int, int]
    park: Mapping[int, int]
    restore: Mapping[int, int]
    # When the caller has made a loss of the outputs; None if they stay.
    outputs_end: Position | None


def _uses_of(facts: StepFacts, micro_batch: int) -> _Uses:
    ticks = facts.ticks
    mine = tuple(
        {block: tick for (block, number), tick in runs.items() if number == micro_batch}
        for runs in (ticks.forward, ticks.backward, ticks.park, ticks.restore)
    )
    forward, backward, park, restore = mine
    handed_in = min(backward.values(), default=max(forward.values(), default=0))
    outputs_end = Position(handed_in, Stream.COMPUTE) if facts.kind.outputs == "release" else None
    return _Uses(micro_batch, facts.kind.mode, facts.saves, forward, backward, park, restore, outputs_end)


def _at(ticks: Mapping[int, int], blocks: Iterable[int], stream: Stream = Stream.COMPUTE) -> list[Position]:
    return [Position(ticks[block], stream) for block in blocks]


def _value_lives(workload: Workload, uses: _Uses, index: int, parked_by: int | None) -> list[Lifetime]:
    value = workload.values[index]
    item, nbytes = Item("value", index, uses.micro_batch), workload.storages[value.storage]
    backward = [] if uses.mode == "forward" else _backward_uses(workload, uses, index)
    if parked_by is not None:
        returned = Lifetime(item, value.nbytes, Position(uses.restore[parked_by], Stream.H2D), tuple(backward))
        if uses.mode == "backward":
            return [returned]
        ends = [*_at(uses.forward, value.readers), Position(uses.park[parked_by], Stream.D2H)]
        original = Item("original", index, uses.micro_batch)
        return [Lifetime(original, nbytes, _made_at(uses, value.producer), tuple(ends)), returned]
    if value.is_output and (uses.outputs_end is None or value.is_committed):
        return [Lifetime(item, nbytes, _made_at(uses, value.producer), ())]
    if uses.mode == "backward":
        return [Lifetime(item, nbytes, None, tuple(backward))] if backward else []
    ends = [*_at(uses.forward, value.readers), *backward]
    if value.is_output and uses.outputs_end is not None:
        ends.append(uses.outputs_end)
    if not ends and value.producer is not None:
        # Nobody reads it: it dies with the forward that makes it.
        ends = _at(uses.forward, [value.producer])
    return [Lifetime(item, nbytes, _made_at(uses, value.producer), tuple(ends))]


def _made_at(uses: _Uses, producer: int | None) -> Position | None:
    if producer is None or uses.mode == "backward":
        return None
    return Position(uses.forward[producer], Stream.COMPUTE)


def _backward_uses(workload: Workload, uses: _Uses, index: int) -> list[Position]:
    """Backwards that need the value: those of its readers, and of its producer if its graph holds it."""
    producer = workload.values[index].producer
    found = _at(uses.backward, workload.backward_readers(index))
    if producer is not None and producer in uses.saves:
        found += _at(uses.backward, [producer])
    return found


def _gradient_lives(workload: Workload, uses: _Uses, index: int) -> list[Lifetime]:
    if not workload.has_value_gradient(index):
        return []
    value = workload.values[index]
    first = min(_at(uses.backward, workload.backward_readers(index)), default=None)
    if value.is_output:
        # The user hands in the gradient of an output when the backward of its micro-batch starts.
        is_there = uses.mode == "backward"
        first = None if is_there else Position(min(uses.backward.values()), Stream.COMPUTE)
    ends = () if value.producer is None else tuple(_at(uses.backward, [value.producer]))
    return [Lifetime(Item("gradient", index, uses.micro_batch), value.nbytes, first, ends)]


def _block_lives(workload: Workload, facts: StepFacts, uses: _Uses, block: int) -> list[Lifetime]:
    work = workload.blocks[block]
    backward = Position(uses.backward[block], Stream.COMPUTE)
    found: list[Lifetime] = []
    if work.gradient_bytes > 0 and uses.micro_batch == 0:
        # The first backward makes it, the others add to it.
        first = min(facts.ticks.backward[block, number] for number in range(facts.kind.micro_batches))
        end = Position(facts.ticks.offload[block, 0], Stream.D2H)
        found.append(Lifetime(Item("parameters", block), work.gradient_bytes, Position(first, Stream.COMPUTE), (end,)))
    if block in uses.saves:
        start = _made_at(uses, block)
        found.append(Lifetime(Item("saved", block, uses.micro_batch), work.saved_bytes, start, (backward,)))
    return found
