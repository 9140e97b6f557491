"""Instructions: every op of a schedule with everything that it needs to run; the runtime walks them."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megatrain.base.sizes import aligned
from megatrain.scheduler.dependency import books_graph, waited_edges, weight_bindings
from megatrain.scheduler.effects import Parks
from megatrain.scheduler.items import Item, Stream
from megatrain.scheduler.lifetimes import Books, Uses
from megatrain.scheduler.table import Op, Position, Table, park_buffers
from megatrain.scheduler.workload import chunk_bytes


class Bytes(NamedTuple):
    """A range of bytes in an arena (of slots, parked values, their buffers, or gradients that land), or in a file."""

    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.offset}+{self.nbytes}"


class Parked(NamedTuple):
    """A value that an `A` moves, and its bytes in its micro-batch's host memory for parked values, or in a buffer."""

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
        buffer: Bytes of all buffers through which an `A`, `E` or `L` moves values that a file has in between; None for
            values that stay in memory.
        file: Bytes of the file that an `E` fills, and an `L` reads.
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
    buffer: Bytes | None = None
    file: Bytes | None = None
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
        buffer_bytes: Host bytes of the buffers for values that a file has in between, of all micro-batches.
        landing_bytes: Host bytes where gradients land.
    """

    forward: Half
    backward: Half
    slot_bytes: int
    park_bytes: int
    buffer_bytes: int
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
        + (f", buffers {instructions.buffer_bytes} B" if instructions.buffer_bytes else "")
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
    "buffer": ("buffer ", str),
    "file": ("file ", str),
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


def emit(table: Table) -> Instructions:
    """Derives the instructions of a table, which must know its workload and be right."""
    positions = list(table.positions())
    split = -1
    if not table.kind.is_training_step:
        split = max((p.tick for p, op in positions if op.what == "F"), default=-1)
    books = Books(table)
    frees, takes, maker = _Frees(books, split), _takes(books, split), _Maker(books)
    made = [
        replace(
            maker.instruction(position, op),
            frees_before=tuple(frees.before[position]),
            frees_after=tuple(frees.after[position]),
            takes=takes.get(position, ()),
        )
        for position, op in positions
    ]
    earlier, later = [i for i in made if i.position.tick <= split], [i for i in made if i.position.tick > split]
    return Instructions(
        forward=Half(tuple(earlier), tuple(frees.forward_ends), takes.get(FORWARD, ())),
        backward=Half(tuple(later), tuple(frees.backward_ends), takes.get(BACKWARD, ())),
        slot_bytes=table.arena_bytes,
        park_bytes=maker.park_bytes,
        buffer_bytes=maker.buffer_bytes,
        landing_bytes=table.landing_bytes,
    )


# The starts of the halves, as keys next to positions.
FORWARD, BACKWARD = "forward", "backward"


def _takes(books: Books, split: int) -> dict[Position | str, tuple[Item, ...]]:
    """The items whose memory is taken with each op, or at the start of a half.

    A forward takes nothing for its backward, which may never come.
    """
    found: dict[Position | str, tuple[Item, ...]] = {}
    for taker, maker, items in books.brought():
        half = FORWARD if maker.tick <= split else BACKWARD
        is_within = taker is not None and (half == FORWARD or taker.tick > split)
        where = taker if taker is not None and is_within else half
        found[where] = (*found.get(where, ()), *items)
    return found


class _Maker:
    """Finds everything that instructions need, except what they free and take."""

    def __init__(self, books: Books) -> None:
        table = self._table = books.table
        self._blocks = table.known_workload().blocks
        self._waits = waited_edges(books_graph(books))
        self._ops = dict(table.positions())
        self._bindings = weight_bindings(table)
        parked = table.parked()
        self._parked, self.park_bytes = _park_places(table, parked)
        self._through, self._in_file, self.buffer_bytes = _evictions(table, parked)
        self._places = {place.block: Bytes(place.offset, place.nbytes) for place in table.places}
        self._staying = {*table.persistent, *table.device_updates}
        self._leaves = self._last_readers()
        backwards = [(position, op) for position, op in table.positions() if op.what == "B"]
        self._recomputed = table.recomputed
        self._turns = {op.micro_batch: position for position, op in reversed(backwards)}

    def instruction(self, position: Position, op: Op) -> Instruction:
        load = position if op.what == "W" else self._bindings.get(position)
        return Instruction(
            position=position,
            op=op,
            waits=self._waits.get(position, ()),
            state=None if load is None else self._state(load),
            persists=op.what == "W" and op.block in self._staying,
            parked=self._parked.get(op.block, ()) if op.what == "A" else (),
            buffer=self._through.get(op),
            file=self._in_file.get((op.block, op.micro_batch))
            if op.stream == Stream.DISK and op.what in "EL"
            else None,
            landing=self._landing(op) if op.what == "G" else None,
            retains=op.what == "F" and op.block in self._table.saves,
            recomputes=op.what == "F" and op.block in self._recomputed,
            keeps=op.what == "F" and op.block in self._table.results,
            turns=self._turns.get(op.micro_batch) == position,
            leaves=tuple(self._leaves[position]),
        )

    def _state(self, load: Position) -> Bytes | None:
        op = self._ops[load]
        if self._table.kind.transfer == "bind":
            return None
        assert op.slot is not None
        work = self._blocks[op.block]
        behind = work.optimizer_bytes if op.block in self._table.device_updates else 0
        return Bytes(self._table.slots[op.slot].offset, work.state_bytes + behind)

    def _landing(self, op: Op) -> Bytes | None:
        if self._table.kind.transfer == "bind":
            return None
        # Gradients that become the caller's at once all go through the slab.
        return self._places.get(op.block, Bytes(0, self._blocks[op.block].landing_bytes))

    def _last_readers(self) -> Mapping[Position, list[Bytes]]:
        last: dict[Position, Position] = {}
        for reader, load in self._bindings.items():
            last[load] = max(last.get(load, reader), reader)
        found: dict[Position, list[Bytes]] = defaultdict(list)
        for load, reader in last.items():
            state = self._state(load)
            if state is not None and self._ops[load].block not in self._staying:
                found[reader].append(state)
        return found


def _park_places(table: Table, parked: Parks) -> tuple[dict[int, tuple[Parked, ...]], int]:
    """Gives each parked value bytes of its own, in the order of the blocks that need them back and of the values.

    Those that go on to a file have theirs in the buffer, and take none besides.
    """
    values, offset, evicted = table.known_workload().values, 0, frozenset(table.evicted)
    found: dict[int, tuple[Parked, ...]] = {}
    for block, members in parked.items():
        at, places = 0 if block in evicted else offset, list[Parked]()
        for value in members:
            nbytes = aligned(values[value].nbytes)
            places.append(Parked(value, Bytes(at, nbytes)))
            at += nbytes
        offset = offset if block in evicted else at
        found[block] = tuple(places)
    return found, offset


_Chunk = tuple[int, int | None]  # a block and a micro-batch


def _evictions(table: Table, parked: Parks) -> tuple[dict[Op, Bytes], dict[_Chunk, Bytes], int]:
    """The buffer of each op that uses one, the place of each chunk in the file, and the bytes of all buffers.

    Chunks are in the file in the order in which they leave.
    """
    buffers, workload, end = park_buffers(table, parked), table.known_workload(), 0
    through, in_file = dict[Op, Bytes](), dict[_Chunk, Bytes]()
    for op in table.ops if buffers else ():
        if op.stream == Stream.DISK and op.what in "EL" and op.slot is not None:
            nbytes = chunk_bytes(workload, parked[op.block])
            copy = Op(Stream.D2H if op.what == "E" else Stream.H2D, "A", op.block, None, op.micro_batch)
            through[op] = through[copy] = Bytes(buffers[op.slot].start, nbytes)
            if op.what == "E":
                in_file[op.block, op.micro_batch] = Bytes(end, nbytes)
                end += nbytes
    return through, in_file, max((each.stop for each in buffers.values()), default=0)


@dataclass(slots=True)
class _Frees:
    """Decides where each item is freed.

    An item last used by a compute op is freed right after this op. An item last used by a transfer is freed before the
    first compute op of a later tick, which waits for the transfer. So all memory is freed and taken by compute, in the
    order of its stream, and is free when the table says so.
    """

    books: Books
    split: int
    before: dict[Position, list[Item]] = field(default_factory=lambda: defaultdict(list))
    after: dict[Position, list[Item]] = field(default_factory=lambda: defaultdict(list))
    forward_ends: list[Item] = field(default_factory=list[Item])
    backward_ends: list[Item] = field(default_factory=list[Item])

    def __post_init__(self) -> None:
        takers = Uses(self.books, "device").takers.get(Stream.COMPUTE, [])
        for life in self.books.lifetimes:
            if life.ends and life.memory == "device":
                self._place(life.item, life.ends, takers)

    def _place(self, item: Item, ends: Sequence[Position], takers: Sequence[Position]) -> None:
        last_compute = max((p.tick for p in ends if p.stream == Stream.COMPUTE), default=-1)
        last_transfer = max((p.tick for p in ends if p.stream != Stream.COMPUTE), default=-1)
        if last_compute > last_transfer:
            self.after[Position(last_compute, Stream.COMPUTE)].append(item)
            return
        is_forward = last_transfer <= self.split
        last_tick = self.split if is_forward else len(self.books.table.ticks)
        first = bisect_right(takers, last_transfer, key=lambda p: p.tick)
        if first < len(takers) and takers[first].tick <= last_tick:
            self.before[takers[first]].append(item)
            return
        (self.forward_ends if is_forward else self.backward_ends).append(item)
