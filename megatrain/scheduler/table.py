"""Table: one step as ticks x streams, with its bytes."""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from typing import NamedTuple

from megatrain.base.sizes import aligned
from megatrain.errors import ScheduleError
from megatrain.scheduler.effects import (
    KINDS,
    Effects,
    Parks,
    kind_of,
    parked_values,
    streams,
)
from megatrain.scheduler.items import NO_BLOCK, Stream
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload, chunk_bytes

_TOKEN = re.compile(r"(?P<what>[A-Z])(?P<block>\d{1,18})?(?:\.(?P<micro>\d{1,18}))?(?:@(?P<slot>\d{1,18}))?")


@dataclass(frozen=True, slots=True)
class Op:
    """One instruction. The same op may recur; its position in the table is its identity.

    Args:
        stream: Where it runs.
        what: One letter; see `megatrain.scheduler.effects.KINDS`.
        block: Block it concerns; `NO_BLOCK` for `N`.
        slot: Slot that it fills, or buffer of the host that an op of the disk fills or empties; None for other ops.
        micro_batch: Micro-batch, where the step has several.

    Raises:
        ScheduleError: If the stream can't do this, or a part is missing or superfluous.

    >>> print(Op(Stream.H2D, "W", 3, slot=1), Op(Stream.HOST, "U", 3))
    W3@1 U3
    """

    stream: Stream
    what: str
    block: int
    slot: int | None = None
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        kind = KINDS.get((self.stream, self.what))
        if kind is None:
            able = " and ".join(what for stream, what in KINDS if stream == self.stream)
            raise ScheduleError(f"the {self.stream} stream can't do `{self.what}`; it does {able or 'nothing'}.")
        if (self.slot is None) == kind.has_slot:
            raise ScheduleError(f"`{self}` must {'name' if kind.has_slot else 'not name'} a slot.")
        if (self.block < 0) == kind.has_block:
            raise ScheduleError(f"`{self}` must {'name' if kind.has_block else 'not name'} a block.")

    @property
    def is_forward(self) -> bool:
        """Whether it runs a block's forward."""
        return self.what == "F"

    @property
    def key(self) -> tuple[Stream, str, int, int]:
        """Stream, letter, block, and micro-batch, which is 0 where the op serves all."""
        return self.stream, self.what, self.block, self.micro_batch or 0

    def __str__(self) -> str:
        block = "" if self.block < 0 else str(self.block)
        micro = "" if self.micro_batch is None else f".{self.micro_batch}"
        slot = "" if self.slot is None else f"@{self.slot}"
        return f"{self.what}{block}{micro}{slot}"


def parse_op(token: str, stream: Stream) -> Op:
    """Reads one token of the `stream` column.

    Raises:
        ScheduleError: If the token is no op, or none of that stream.

    >>> parse_op("A3.0", Stream.D2H).micro_batch
    0
    """
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise ScheduleError(f"`{token}` is not an op; an op reads like W3@1, F3, A3.0 or G3.")
    block, *rest = (None if match[g] is None else int(match[g]) for g in ("block", "slot", "micro"))
    return Op(stream, match["what"], NO_BLOCK if block is None else block, *rest)


class Position(NamedTuple):
    """The place of an op in the table, which is its identity."""

    tick: int
    stream: Stream


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


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """The bytes of the host where a block's gradients land, and wait for their norm and their updates.

    Places may overlap in bytes; the gradients that they hold at the same time don't.

    Args:
        offset: First byte, from the start of all places.
    """

    block: int
    offset: int
    nbytes: int


class Tick(Mapping[Stream, Op]):
    """One row: at most one op per stream, in the order of the columns. It orders and proves; it is not a duration.

    Args:
        ops: The ops; None stands for no op.

    Raises:
        ScheduleError: If two are of one stream, or the kind of one is no longer registered.

    >>> print(*Tick(Op(Stream.COMPUTE, "F", 3), Op(Stream.H2D, "W", 4, slot=0)).values())
    W4@0 F3
    """

    __slots__ = ("_ops",)

    def __init__(self, *ops: Op | None) -> None:
        found: dict[Stream, Op] = {}
        for op in ops:
            if op is not None and op.stream in found:
                raise ScheduleError(f"`{op}` and `{found[op.stream]}` are in one tick of the {op.stream} stream.")
            if op is not None:
                kind_of(op.stream, op.what)
                found[op.stream] = op
        self._ops = {stream: found[stream] for stream in streams() if stream in found} if len(found) > 1 else found

    def __getitem__(self, stream: str) -> Op:
        return self._ops[Stream(stream)]

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._ops)

    def __len__(self) -> int:
        return len(self._ops)

    def items(self) -> ItemsView[Stream, Op]:
        """The ops by stream, in the order of the columns."""
        return self._ops.items()

    def values(self) -> ValuesView[Op]:
        """The ops, in the order of the columns."""
        return self._ops.values()

    def __hash__(self) -> int:
        return hash(tuple(self._ops.values()))

    def __repr__(self) -> str:
        return f"Tick({', '.join(f'{stream}={op}' for stream, op in self.items())})"

    def replaced(self, stream: str, op: Op | None) -> Tick:
        """The row with another op, or none, in one stream."""
        return Tick(op, *(other for at, other in self.items() if at != stream))

    @property
    def h2d(self) -> Op | None:
        """The op that copies to the device."""
        return self._ops.get(Stream.H2D)

    @property
    def compute(self) -> Op | None:
        """The op that computes."""
        return self._ops.get(Stream.COMPUTE)

    @property
    def d2h(self) -> Op | None:
        """The op that copies to the host."""
        return self._ops.get(Stream.D2H)

    @property
    def host(self) -> Op | None:
        """The op that works on the host."""
        return self._ops.get(Stream.HOST)


def columns(ticks: Iterable[Tick]) -> tuple[Stream, ...]:
    """All streams in the order of the columns, once it is known that they hold every op.

    Those of the disk, and of ops that `register_op` has added, only where they have one.

    Raises:
        ScheduleError: If the kind of an op is no longer registered.
    """
    used: set[Stream] = set()
    for tick in ticks:
        for op in tick.values():
            kind_of(op.stream, op.what)
            used.add(op.stream)
    return tuple(stream for stream in streams() if stream in used or stream in _OWN_STREAMS)


_OWN_STREAMS = frozenset((Stream.H2D, Stream.COMPUTE, Stream.D2H, Stream.HOST))


@dataclass(frozen=True, slots=True)
class Table:
    """Everything one step does, in order, and the bytes it takes: the fields of a `Schedule`, without its methods.

    Args:
        ticks: The table.
        slots: By offset.
        keep: The inputs of the last `keep` blocks, counted from the last block with a backward, stay on the
            device; the inputs of earlier blocks are parked on the host.
        saves: Blocks whose forward graph is retained, ascending; every other block recomputes.
        live_bytes: Per tick, the bytes of everything that exists on the device at any moment of it, both ends
            inclusive, workspace not counted.
        h2d_bytes: Bytes copied to the device.
        d2h_bytes: Bytes copied to the host.
        peak_bytes: Largest of `live_bytes`.
        device_bytes: The most bytes of any moment, with the workspace of the F or B that runs then; what budgets bound.
            Memory for what a transfer brings is taken when the op of compute before it is over, without its workspace.
        host_bytes: Bytes of all parked values, each in its own bytes, or of the buffers through which they go on to a
            file, plus those where gradients land: one slab as
            large as the largest gradients of a block, from which they become the caller's. Of a step with updates
            or a norm all `places`; where weights are used in place, the most bytes of gradients that wait for their
            updates at any tick. Also those of values that lie on the host, all at once. State isn't counted.
        num_blocks: Blocks of the model.
        kind: The kind of the step.
        places: Where gradients land and wait on the host, by block. None where they go to the caller at once, or
            are used where they are made.
        persistent: Blocks whose frozen weights stay on the device across training steps, ascending. Each has one `W`,
            which moves only the rest of its state, and bytes of the arena that no other block uses.
        results: Blocks that keep results of their forward (those of attention) for their backward, ascending, so that
            these aren't computed again. They stay on the device or are parked as the block's inputs are.
        recorded: Blocks whose kernels are recorded and launched by one call (CUDA graphs), ascending: in the forward,
            and in the backward, which recomputes.
        device_updates: Blocks that the device updates, ascending. Their weights stay there across training steps, with
            the state of the optimizer behind them, in bytes of the arena that no other block uses. Each has one `W`,
            which moves nothing once they are there, no `G`, and its `U` on the stream of compute.
        workload: The workload that it was built for; not part of the text, nor of equality.
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
    persistent: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    recorded: tuple[int, ...] = ()
    device_updates: tuple[int, ...] = ()
    workload: Workload | None = field(default=None, compare=False, repr=False)

    @property
    def num_slots(self) -> int:
        """How many slots there are."""
        return len(self.slots)

    @property
    def frozen(self) -> tuple[int, ...]:
        """Blocks without gradients of their own, ascending: no G offloads any, and no update on the device uses any.

        Empty for inference.
        """
        if self.kind.mode == "forward":
            return ()
        computed = {op.block for op in self.ops if op.what in "FB"}
        return tuple(sorted(computed.difference(op.block for op in self.ops if op.what in "GU")))

    @property
    def recomputed(self) -> frozenset[int]:
        """Blocks whose backward runs their forward again."""
        return frozenset(op.block for op in self.ops if op.what == "B").difference(self.saves)

    @property
    def num_parks(self) -> int:
        """How many times activations leave the device between forward and backward."""
        return sum(op.what == "A" and op.stream == Stream.D2H for op in self.ops)

    @property
    def deferred(self) -> tuple[int, ...]:
        """Blocks whose gradients of this step are used by an update at the head of the next step, ascending.

        In this table their `U` comes before their `G`, and uses the gradients of the previous step.
        """
        if self.kind.updates not in ("deferred", "spread"):
            return ()
        # Gradients leave when all weights have been read, and so updated: the table has no tick with both.
        left = (tick for tick, row in enumerate(self.ticks) if row.d2h is not None and row.d2h.what == "G")
        head = next(left, len(self.ticks)) if self.kind.updates == "spread" else len(self.ticks)
        hosts = (row.host for row in self.ticks[:head])
        return tuple(sorted({op.block for op in hosts if op is not None and op.what == "U"}))

    @property
    def arena_bytes(self) -> int:
        """Bytes of the device arena that the slots share."""
        return arena_bytes(self.slots)

    @property
    def ops(self) -> tuple[Op, ...]:
        """All ops, tick by tick, in the order of the columns."""
        return tuple(op for tick in self.ticks for op in tick.values())

    def positions(self) -> Iterator[tuple[Position, Op]]:
        """All ops with their positions, in the order of `ops`."""
        for index, tick in enumerate(self.ticks):
            for stream, op in tick.items():
                yield Position(index, stream), op

    @property
    def park_bytes(self) -> int:
        """The part of `host_bytes` that parked values take."""
        return park_bytes(self, self.parked())

    @property
    def evicted(self) -> tuple[int, ...]:
        """Blocks whose parked values are in a file between forward and backward, ascending."""
        return tuple(sorted({op.block for op in _evictions(self)}))

    @property
    def evicted_bytes(self) -> int:
        """Bytes of these values in the file: what a step writes there, and reads again."""
        workload, parked = self.known_workload(), self.parked()
        return sum(chunk_bytes(workload, parked.get(op.block, ())) for op in _evictions(self))

    @property
    def landing_bytes(self) -> int:
        """The part of `host_bytes` where gradients of parameters land."""
        return self.host_bytes - self.park_bytes - self.host_value_bytes

    @property
    def host_value_bytes(self) -> int:
        """The part of `host_bytes` that values on the host take, and their gradients."""
        return host_value_bytes(self.known_workload(), self.kind)

    def effects(self) -> Effects:
        """What each op of this step does.

        Raises:
            ScheduleError: If the table doesn't know its workload.
        """
        workload = self.known_workload()
        kept = self.saves, self.results, self.parked(), self.persistent
        return Effects(workload, self.kind, *kept, self.deferred, self.recorded, self.device_updates)

    def parked(self) -> dict[int, tuple[int, ...]]:
        """Values that `A` parks and returns, by the block of the op."""
        workload = self.known_workload()
        return parked_values(workload, self.kind, keep=self.keep, saves=self.saves, results=self.results)

    def known_workload(self) -> Workload:
        """The workload.

        Raises:
            ScheduleError: If the schedule was read from a text without one.
        """
        if self.workload is None:
            raise ScheduleError(
                "this schedule doesn't know its workload.\n"
                "  The text of a schedule contains no sizes: use Schedule.parse(text, workload)."
            )
        return self.workload


def arena_bytes(slots: Iterable[Slot]) -> int:
    """Bytes of the device arena that slots share."""
    return max((slot.offset + slot.nbytes for slot in slots), default=0)


def _evictions(table: Table) -> list[Op]:
    return [op for tick in table.ticks if (op := tick.get(Stream.DISK)) is not None and op.what == "E"]


def park_buffers(table: Table, parked: Parks) -> dict[int, range]:
    """The buffers of the host through which parked values go to a file, by number: their bytes in one memory.

    Each is as large as the largest values of a block and micro-batch that it ever holds.
    """
    workload, sizes = table.known_workload(), dict[int, int]()
    for tick in table.ticks:
        op = tick.get(Stream.DISK)
        if op is not None and op.what in ("E", "L") and op.slot is not None:
            sizes[op.slot] = max(sizes.get(op.slot, 0), chunk_bytes(workload, parked.get(op.block, ())))
    found, start = dict[int, range](), 0
    for slot in sorted(sizes):
        found[slot] = range(start, start + sizes[slot])
        start = found[slot].stop
    return found


def park_bytes(table: Table, parked: Parks) -> int:
    """Host bytes of parked values of all micro-batches: each in bytes of its own, or buffers for those in a file."""
    workload, evicted = table.known_workload(), frozenset(table.evicted)
    own = (v for block, values in parked.items() if block not in evicted for v in values)
    buffers = max((each.stop for each in park_buffers(table, parked).values()), default=0)
    return table.kind.micro_batches * sum(aligned(workload.values[v].nbytes) for v in own) + buffers


def host_value_bytes(workload: Workload, kind: StepKind) -> int:
    """Host bytes of all values that lie on the host, of all micro-batches, and of their gradients, all at once."""
    held = sum(workload.storages[storage] for storage in {value.storage for value in workload.values if value.on_host})
    if kind.mode != "forward":
        gradients = (i for i, value in enumerate(workload.values) if value.on_host and workload.has_value_gradient(i))
        held += sum(workload.values[index].nbytes for index in gradients)
    return kind.micro_batches * held
