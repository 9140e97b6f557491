"""Table: one step as ticks x streams, with what it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from megatrain.checks import checked
from megatrain.errors import ScheduleError
from megatrain.scheduler.op import STREAMS, Op, Stream
from megatrain.scheduler.parking import park_bytes, parked_values
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload


class Position(NamedTuple):
    """The place of an op in the table, which is its identity."""

    tick: int
    stream: Stream


@checked()
@dataclass(frozen=True, slots=True)
class Slot:
    """A byte range of the device arena that holds the state of one block at a time.

    Slots may overlap in bytes; the states that they hold at the same time don't. A block uses the first
    `state_bytes` of its slot.

    Args:
        offset: First byte; no two slots have the same.
        nbytes: Size of the largest state it ever holds.
    """

    offset: int
    nbytes: int


@checked()
@dataclass(frozen=True, slots=True, order=True)
class Place:
    """The bytes of the host where a block's gradients land, and wait for their norm and their updates.

    Places may overlap in bytes; the gradients that they hold at the same time don't.

    Args:
        block: Whose gradients.
        offset: First byte, from the start of all places.
        nbytes: Bytes they take.
    """

    block: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Tick:
    """One row: at most one op per stream. It orders and proves; it is not a duration."""

    h2d: Op | None = None
    compute: Op | None = None
    d2h: Op | None = None
    host: Op | None = None

    def __post_init__(self) -> None:
        for stream in STREAMS:
            op = self.at(stream)
            if op is not None and op.stream != stream:
                raise ScheduleError(f"`{op}` of the {op.stream} stream stands in the {stream} column.")

    def at(self, stream: Stream) -> Op | None:
        """The op of one stream."""
        return (self.h2d, self.compute, self.d2h, self.host)[STREAMS.index(stream)]

    def ops(self) -> Iterator[tuple[Stream, Op]]:
        """The ops that are there, in the order of the columns."""
        for stream, op in zip(STREAMS, (self.h2d, self.compute, self.d2h, self.host), strict=True):
            if op is not None:
                yield stream, op


@checked()
@dataclass(frozen=True, slots=True)
class Table:
    """Everything one step does, in order, and the bytes it takes: what a `Schedule` holds, without its verbs.

    Args:
        ticks: The table.
        slots: By offset.
        keep: The inputs of the last `keep` blocks, counted from the last block with a backward, stay on the
            device; those of older blocks are parked on the host.
        saves: Blocks whose forward graph is retained, ascending; every other block recomputes.
        live_bytes: Per tick, the bytes of everything that exists on the device at any moment of it, both ends
            inclusive, workspace not counted.
        h2d_bytes: Bytes copied to the device.
        d2h_bytes: Bytes copied to the host.
        peak_bytes: Largest of `live_bytes`.
        device_bytes: Largest sum of `live_bytes` and the workspace of the tick's F or B; what budgets bound.
        host_bytes: Bytes of all parked values, each in its own bytes, plus those where gradients land: one slab as
            large as the largest gradients of a block, from which they become the caller's. Of a step with updates
            or a norm all `places`; where weights are used in place, the most bytes of gradients that wait for their
            updates at any tick. State isn't counted.
        num_blocks: Blocks of the model.
        kind: What it does besides running the blocks.
        places: Where gradients land and wait on the host, by block. None where they go to the caller at once, or
            are used where they are made.
        workload: What it was built for; not part of the text, nor of equality.
    """

    ticks: tuple[Tick, ...]
    slots: tuple[Slot, ...]
    keep: int
    saves: tuple[int, ...]
    live_bytes: tuple[int, ...]
    h2d_bytes: int
    d2h_bytes: int
    peak_bytes: int
    device_bytes: int
    host_bytes: int
    num_blocks: int
    kind: StepKind
    places: tuple[Place, ...] = ()
    workload: Workload | None = field(default=None, compare=False, repr=False)

    @property
    def num_slots(self) -> int:
        """How many slots there are."""
        return len(self.slots)

    @property
    def frozen(self) -> tuple[int, ...]:
        """Blocks without gradients of their own, ascending: no G offloads any. Empty for inference."""
        if self.kind.mode == "forward":
            return ()
        computed = {op.block for op in self.ops if op.what in "FB"}
        return tuple(sorted(computed.difference(op.block for op in self.ops if op.what == "G")))

    @property
    def arena_bytes(self) -> int:
        """Bytes of the device arena that the slots share."""
        return max((slot.offset + slot.nbytes for slot in self.slots), default=0)

    @property
    def ops(self) -> tuple[Op, ...]:
        """All ops, tick by tick, in the order of the columns."""
        return tuple(op for tick in self.ticks for _, op in tick.ops())

    def positions(self) -> Iterator[tuple[Position, Op]]:
        """All ops with their positions, in the order of `ops`."""
        for index, tick in enumerate(self.ticks):
            for stream, op in tick.ops():
                yield Position(index, stream), op

    @property
    def park_bytes(self) -> int:
        """The part of `host_bytes` that parked values take."""
        return park_bytes(self.known_workload(), self.kind, self.parked())

    @property
    def landing_bytes(self) -> int:
        """The part of `host_bytes` where gradients of parameters land."""
        return self.host_bytes - self.park_bytes

    def parked(self) -> dict[int, tuple[int, ...]]:
        """Values that `A` parks and returns, by the block of the op."""
        return parked_values(self.known_workload(), self.kind, keep=self.keep, saves=self.saves)

    def known_workload(self) -> Workload:
        """The workload.

        Raises:
            ScheduleError: If the schedule was read from a text without one.
        """
        if self.workload is None:
            raise ScheduleError(
                "this schedule doesn't know its workload.\n"
                "  The text of a schedule has no sizes: use Schedule.parse(text, workload) or from_json."
            )
        return self.workload
