"""Lifetimes: from which op to which each tensor of a step exists on the device.

Both the accounting of memory and the runtime follow these; the checker derives its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatrain.scheduler.op import Stream
from megatrain.scheduler.order import OpTicks
from megatrain.scheduler.table import Position, Schedule
from megatrain.scheduler.workload import Workload


class Item(NamedTuple):
    """Something that takes device memory.

    `"value"` and `"gradient"` have the number of a value, `"parameters"` (gradients of a block's parameters)
    and `"saved"` (a retained graph) that of a block.
    """

    kind: Literal["value", "gradient", "parameters", "saved"]
    number: int


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One life of an item. A parked value has two: before it leaves the device and after its return.

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
        mode: As in `Schedule`.
    """

    ticks: OpTicks
    saves: frozenset[int]
    parked: Mapping[int, Sequence[int]]
    mode: str


def lifetimes(schedule: Schedule) -> tuple[Lifetime, ...]:
    """All lifetimes of a schedule: values by index, then gradients, then those of the blocks.

    Raises:
        ScheduleError: If the schedule doesn't know its workload.
    """
    facts = StepFacts(op_ticks(schedule), frozenset(schedule.saves), schedule.parked(), schedule.mode)
    return step_lifetimes(schedule.known_workload(), facts)


def op_ticks(schedule: Schedule) -> OpTicks:
    """The ticks of the ops of a table, `W` aside; of an op that recurs, the last."""
    found = OpTicks({}, {}, {}, {}, {})
    rows = {
        (Stream.COMPUTE, "F"): found.forward,
        (Stream.COMPUTE, "B"): found.backward,
        (Stream.D2H, "A"): found.park,
        (Stream.H2D, "A"): found.restore,
        (Stream.D2H, "G"): found.offload,
    }
    for position, op in schedule.positions():
        if (op.stream, op.what) in rows:
            rows[op.stream, op.what][op.block] = position.tick
    return found


def step_lifetimes(workload: Workload, facts: StepFacts) -> tuple[Lifetime, ...]:
    """The same as `lifetimes`, for a table in the making."""
    parked_by = {value: block for block, values in facts.parked.items() for value in values}
    found: list[Lifetime] = []
    for value in range(len(workload.values)):
        found += _value_lives(workload, facts, value, parked_by.get(value))
    if facts.mode != "forward":
        for value in range(len(workload.values)):
            found += _gradient_lives(workload, facts, value)
    for block in facts.ticks.backward:
        found += _block_lives(workload, facts, block)
    return tuple(found)


def _at(ticks: Mapping[int, int], blocks: Iterable[int], stream: Stream = Stream.COMPUTE) -> list[Position]:
    return [Position(ticks[block], stream) for block in blocks]


def _value_lives(workload: Workload, facts: StepFacts, index: int, parked_by: int | None) -> list[Lifetime]:
    value, ticks = workload.values[index], facts.ticks
    item, nbytes = Item("value", index), workload.storages[value.storage]
    backward = [] if facts.mode == "forward" else _backward_uses(workload, facts, index)
    if parked_by is not None:
        restore = Position(ticks.restore[parked_by], Stream.H2D)
        second = Lifetime(item, value.nbytes, restore, tuple(backward))
        if facts.mode == "backward":
            return [second]
        ends = [*_at(ticks.forward, value.readers), Position(ticks.park[parked_by], Stream.D2H)]
        return [Lifetime(item, nbytes, _made_at(facts, value.producer), tuple(ends)), second]
    if value.is_output:
        return [Lifetime(item, nbytes, _made_at(facts, value.producer), ())]
    if facts.mode == "backward":
        return [Lifetime(item, nbytes, None, tuple(backward))] if backward else []
    ends = [*_at(ticks.forward, value.readers), *backward]
    if not ends and value.producer is not None:
        # Nobody reads it: it dies with the forward that makes it.
        ends = _at(ticks.forward, [value.producer])
    return [Lifetime(item, nbytes, _made_at(facts, value.producer), tuple(ends))]


def _made_at(facts: StepFacts, producer: int | None) -> Position | None:
    if producer is None or facts.mode == "backward":
        return None
    return Position(facts.ticks.forward[producer], Stream.COMPUTE)


def _backward_uses(workload: Workload, facts: StepFacts, index: int) -> list[Position]:
    """Backwards that need the value: those of its readers, and of its producer if its graph holds it."""
    producer = workload.values[index].producer
    uses = _at(facts.ticks.backward, workload.backward_readers(index))
    if producer is not None and producer in facts.saves:
        uses += _at(facts.ticks.backward, [producer])
    return uses


def _gradient_lives(workload: Workload, facts: StepFacts, index: int) -> list[Lifetime]:
    if not workload.has_value_gradient(index):
        return []
    value, ticks = workload.values[index], facts.ticks
    first = min(_at(ticks.backward, workload.backward_readers(index)), default=None)
    if value.is_output:
        # The user hands in the gradient of an output when the backward starts.
        is_there = facts.mode == "backward"
        first = None if is_there else Position(min(ticks.backward.values()), Stream.COMPUTE)
    ends = () if value.producer is None else tuple(_at(ticks.backward, [value.producer]))
    return [Lifetime(Item("gradient", index), value.nbytes, first, ends)]


def _block_lives(workload: Workload, facts: StepFacts, block: int) -> list[Lifetime]:
    work, ticks = workload.blocks[block], facts.ticks
    backward = Position(ticks.backward[block], Stream.COMPUTE)
    found: list[Lifetime] = []
    if work.gradient_bytes > 0:
        end = Position(ticks.offload[block], Stream.D2H)
        found.append(Lifetime(Item("parameters", block), work.gradient_bytes, backward, (end,)))
    if block in facts.saves:
        start = _made_at(facts, block)
        found.append(Lifetime(Item("saved", block), work.saved_bytes, start, (backward,)))
    return found
