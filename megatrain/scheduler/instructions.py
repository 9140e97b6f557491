"""Instructions: every op of a schedule with everything that it needs to run; the runtime walks them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatrain.scheduler.items import Item
from megatrain.scheduler.table import Op, Position


class Bytes(NamedTuple):
    """A range of bytes in one of the arenas: that of the slots, of parked values, or of gradients that land."""

    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.offset}+{self.nbytes}"


class Parked(NamedTuple):
    """A value that an `A` moves, and its bytes in the host memory for parked values of its micro-batch."""

    value: int
    host: Bytes


@dataclass(frozen=True, slots=True)
class Instruction:
    """An op with everything that it needs to run.

    Args:
        position: Its place in the table.
        op: The op.
        waits: Ops of other streams that must be over when it starts.
        state: Bytes of the slots that a `W` fills, or that an F, a B or the device's U reads; None for what has no
            state, and for all where weights are used in place. Of a block that the device updates, those of the
            optimizer's state follow those of the weights.
        persists: A `W` whose frozen weights, or whose whole state, may be there from an earlier step: then it moves
            only the rest.
        parked: The values that an `A` moves.
        landing: Host bytes where a `G` puts gradients; None where they stay where they are made.
        retains: An F that retains its graph.
        recomputes: An F that its B will repeat.
        keeps: An F that keeps its results for its B, which doesn't compute them again.
        turns: The first B of its micro-batch: the caller hands in the gradients of the outputs.
        frees_before: Items to free when its waits are over: transfers used them last.
        frees_after: Items whose last use it is.
        takes: Items that transfers of later ticks bring to the device; their memory is taken then, when the op is over.
        leaves: Bytes of the slots whose state it is the last to read.
    """

    position: Position
    op: Op
    waits: tuple[Position, ...] = ()
    state: Bytes | None = None
    persists: bool = False
    parked: tuple[Parked, ...] = ()
    landing: Bytes | None = None
    retains: bool = False
    recomputes: bool = False
    keeps: bool = False
    turns: bool = False
    frees_before: tuple[Item, ...] = ()
    frees_after: tuple[Item, ...] = ()
    takes: tuple[Item, ...] = ()
    leaves: tuple[Bytes, ...] = ()

    @property
    def micro_batch(self) -> int:
        """Whose op it is; what concerns all micro-batches counts as the first's."""
        return self.op.micro_batch or 0


@dataclass(frozen=True, slots=True)
class Half:
    """Instructions that run without a break.

    Args:
        instructions: In the order of the table.
        frees: Items to free when they are over.
        takes: Items whose memory is taken before they begin.
    """

    instructions: tuple[Instruction, ...]
    frees: tuple[Item, ...]
    takes: tuple[Item, ...] = ()


@dataclass(frozen=True, slots=True)
class Instructions:
    """All instructions of a schedule, in the order of its table, split where the caller gets the model's outputs.

    Args:
        forward: Up to the tick of the last F of a call; nothing of a training step, which isn't split.
        backward: The rest.
        slot_bytes: Device bytes of the slots.
        park_bytes: Host bytes for the parked values of one micro-batch.
        landing_bytes: Host bytes where gradients land.
    """

    forward: Half
    backward: Half
    slot_bytes: int
    park_bytes: int
    landing_bytes: int

    def __str__(self) -> str:
        return _text(self)

    @property
    def all(self) -> tuple[Instruction, ...]:
        """Both halves."""
        return self.forward.instructions + self.backward.instructions


_STARTS = ("start", "backward")
_ENDS = ("outputs", "end")


def _text(instructions: Instructions) -> str:
    """Prints one line per instruction: tick, stream and op, then what it waits for, its bytes, and what it frees.

    A line at the start of each half says what memory is taken then, and one at its end what is let go of. Parts that
    would say nothing are left out.
    """
    halves = (instructions.forward, instructions.backward)
    lines = [
        f"instructions: {len(halves[0].instructions)} until the outputs, {len(halves[1].instructions)} after; "
        f"slots {instructions.slot_bytes} B, parks {instructions.park_bytes} B, landing {instructions.landing_bytes} B"
    ]
    cells = [[str(i.position.tick), str(i.position.stream), str(i.op)] for i in instructions.all]
    widths = [max((len(row[column]) for row in cells), default=0) for column in range(3)]
    rows = iter(cells)
    for half, start, end in zip(halves, _STARTS, _ENDS, strict=True):
        if half.takes:
            lines.append(f"{start}: takes {_items(half.takes)}")
        for instruction in half.instructions:
            tick, stream, op = next(rows)
            cell = f"{tick.rjust(widths[0])}  {stream.ljust(widths[1])}  {op.ljust(widths[2])}"
            lines.append("  ".join([cell, "; ".join(_parts(instruction))]).rstrip())
        if half.frees:
            lines.append(f"{end}: frees {_items(half.frees)}")
    return "\n".join(lines)


def _parts(instruction: Instruction) -> Iterable[str]:
    for key, (word, write) in _FIELDS.items():
        value = getattr(instruction, key)
        if value not in ((), None, False):
            yield f"{word}{write(value)}"


def _positions(positions: Iterable[Position]) -> str:
    return ", ".join(f"{p.stream} {p.tick}" for p in positions)


def _items(items: Iterable[Item]) -> str:
    return ", ".join(f"{i.kind} {i.number}{f'.{i.micro_batch}' if i.micro_batch else ''}" for i in items)


def _nothing(value: object) -> str:
    return ""


# Each part of an instruction: its attribute, the words for it, and how its value is written.
_FIELDS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "waits": ("after ", _positions),
    "state": ("state ", str),
    "persists": ("persists", _nothing),
    "parked": ("values ", lambda values: ", ".join(f"{p.value} at {p.host}" for p in values)),
    "landing": ("lands at ", str),
    "retains": ("retains its graph", _nothing),
    "recomputes": ("will be recomputed", _nothing),
    "keeps": ("keeps its results", _nothing),
    "turns": ("turns", _nothing),
    "frees_before": ("first frees ", _items),
    "frees_after": ("frees ", _items),
    "takes": ("takes ", _items),
    "leaves": ("leaves ", lambda values: ", ".join(map(str, values))),
}
