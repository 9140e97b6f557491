"""Schedule: one step as a table of ticks x streams, with what it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from megatrain.checks import checked
from megatrain.errors import ScheduleError
from megatrain.scheduler.op import STREAMS, Op, Stream
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload

if TYPE_CHECKING:
    import networkx as nx

    from megatrain.scheduler.costs import Costs
    from megatrain.scheduler.simulate import Simulation


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
class Schedule:
    """Everything one step does, in order, and the bytes it takes; made by `schedule`, printed by `str`.

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
        host_bytes: Bytes of all parked values, each with its own place, plus one slab as large as the largest
            gradients of a block, from which they become the caller's. Of a step with updates or a norm, instead of
            the slab, the most bytes of gradients that wait for their updates at any tick. State isn't counted.
        num_blocks: Blocks of the model.
        kind: What it does besides running the blocks.
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

    def __str__(self) -> str:
        from megatrain.scheduler.text import schedule_text

        return schedule_text(self)

    @staticmethod
    def parse(text: str, workload: Workload | None = None) -> Schedule:
        """Reads what `str` wrote; the result equals the original.

        Raises:
            ScheduleError: If the text isn't a schedule, with the number of the line.
        """
        from megatrain.scheduler.text import parse_schedule

        return parse_schedule(text, workload)

    def to_json(self) -> str:
        """The schedule and its workload as JSON."""
        from megatrain.scheduler.serialize import schedule_to_json

        return schedule_to_json(self)

    @staticmethod
    def from_json(text: str) -> Schedule:
        """Reads what `to_json` wrote.

        Raises:
            ScheduleError: If the text isn't a schedule.
        """
        from megatrain.scheduler.serialize import schedule_from_json

        return schedule_from_json(text)

    def parked(self) -> dict[int, tuple[int, ...]]:
        """Values that `A` parks and returns, by the block of the op."""
        from megatrain.scheduler.parking import parked_values

        return parked_values(self.known_workload(), self.kind, keep=self.keep, saves=self.saves)

    def bindings(self) -> dict[Position, Position]:
        """For each F and B of a block with state, the position of the `W` whose slot it reads."""
        from megatrain.scheduler.dependency import weight_bindings

        return weight_bindings(self)

    def waits(self) -> Mapping[Position, tuple[Position, ...]]:
        """For each op, the ops of other streams whose completion it waits for; none follows from another."""
        from megatrain.scheduler.dependency import derive_waits

        return derive_waits(self)

    def to_networkx(self) -> nx.DiGraph[Position]:
        """The dependency graph over positions; see `dependency_graph`."""
        from megatrain.scheduler.dependency import dependency_graph

        return dependency_graph(self)

    @checked()
    def check(self, workload: Workload | None = None) -> None:
        """Proves that the schedule is safe for its workload, or for another one; see `check_schedule`.

        Raises:
            ScheduleError: With the rule that is broken, and the rows around the place.
        """
        from megatrain.scheduler.check import check_schedule

        check_schedule(self, self.known_workload() if workload is None else workload)

    def simulate(self, costs: Costs) -> Simulation:
        """Runs the schedule on paper; see `megatrain.scheduler.simulate.simulate`."""
        from megatrain.scheduler.simulate import simulate

        return simulate(self, costs)

    def critical_path(self, costs: Costs) -> tuple[float, tuple[Position, ...]]:
        """Seconds and ops of the longest chain of dependencies."""
        from megatrain.scheduler.simulate import critical_path

        return critical_path(self, costs)

    def lower_bounds(self, costs: Costs) -> dict[str, float]:
        """Seconds below which no order of the same ops can come, per reason."""
        from megatrain.scheduler.simulate import lower_bounds

        return lower_bounds(self, costs)

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
