"""emit(): the instructions of a table: the waits of each op, the places of its bytes, and the memory that it frees."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatrain.scheduler.dependency import books_graph, weight_bindings
from megatrain.scheduler.happens import waited_edges
from megatrain.scheduler.instructions import Bytes, Half, Instruction, Instructions, Parked
from megatrain.scheduler.items import Item, Stream
from megatrain.scheduler.lifetimes import Books, Uses
from megatrain.scheduler.table import Op, Position, Table
from megatrain.sizes import aligned


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
        self._parked, self.park_bytes = _park_places(table)
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


def _park_places(table: Table) -> tuple[dict[int, tuple[Parked, ...]], int]:
    """Gives each parked value bytes of its own, in the order of the blocks that need them back and of the values."""
    values, offset = table.known_workload().values, 0
    found: dict[int, tuple[Parked, ...]] = {}
    for block, parked in table.parked().items():
        places: list[Parked] = []
        for value in parked:
            nbytes = aligned(values[value].nbytes)
            places.append(Parked(value, Bytes(offset, nbytes)))
            offset += nbytes
        found[block] = tuple(places)
    return found, offset


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
