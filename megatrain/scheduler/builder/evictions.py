"""with_evictions(): has parked values of some blocks go on to a file, where the host lacks the memory for them.

A chunk is what one `A` moves: the parked values of a block and a micro-batch. After its copy to the host an `E` writes
the chunk to the file, and an `L` reads it before its copy to the device. On both ways it passes through a buffer of the
host, of which there are two or three for all chunks. Both ops are of the stream `disk`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatrain.scheduler.builder.draft import with_figures
from megatrain.scheduler.builder.moments import ring
from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Op, Table, Tick, park_bytes
from megatrain.scheduler.workload import chunk_bytes


def with_evictions(table: Table, most_park_bytes: int | None) -> Table:
    """Puts ops of the disk into a table, so that parked values take at most so many bytes of the host.

    Values of the first blocks go to the file: these leave first and return last, so that the disk has the most time.
    No more blocks do than need be. If all of them are too few, the table takes as little as it can. Other ops keep
    their order; a row is added where the disk has no free one.

    >>> from megatrain.scheduler.builder.build import build
    >>> from megatrain.scheduler.step_kind import StepKind
    >>> from megatrain.scheduler.workload import BlockWork, ValueWork, Workload
    >>> values = [ValueWork(f"v{n}", 4096, n, n, (n + 1,), False, True, True) for n in range(5)]
    >>> workload = Workload((BlockWork("layer", 1024, 1024, 0, 0, 0, True),) * 6, tuple(values), (4096,) * 5)
    >>> made = build(workload, StepKind(outputs="release"), num_slots=2, activations="offload")
    >>> print(*(op for op in with_evictions(made, 12288).ops if op.what in "AEL"))
    A1 A2 E1@0 A3 E2@1 A4 E3@0 A4 L3@1 A3 L2@0 L1@1 A2 A1
    """
    if most_park_bytes is None or not table.kind.is_training_step or table.evicted:
        return table
    workload, parked, least, chosen = table.known_workload(), table.parked(), table.park_bytes, list[_Fill]()
    sizes: dict[int, int] = {}
    for block in sorted(parked):
        if least <= most_park_bytes:
            break
        sizes[block] = chunk_bytes(workload, parked[block])
        fills = _fills(table, sizes)
        left = {each: values for each, values in parked.items() if each not in sizes}
        nbytes = park_bytes(table, left) + _buffer_bytes(fills, sizes)
        if nbytes < least:
            least, chosen = nbytes, fills
    return with_figures(replace(table, ticks=tuple(_rows(table.ticks, chosen)))) if chosen else table


class _Fill(NamedTuple):
    """A chunk in a buffer: from its `A` to the host to its `E`, or from its `L` to its `A` to the device.

    Attributes:
        op: The `A`.
        slot: The buffer.
        before: The number of the fill before it in the same buffer; -1 for none.
    """

    op: Op
    slot: int
    before: int

    @property
    def leaves(self) -> bool:
        """Whether the chunk leaves the device."""
        return self.op.stream == Stream.D2H

    @property
    def moved(self) -> Op:
        """The `E` or `L`."""
        return Op(Stream.DISK, "E" if self.leaves else "L", self.op.block, self.slot, self.op.micro_batch)


def _fills(table: Table, sizes: Mapping[int, int]) -> list[_Fill]:
    """The fills of all buffers, in the order of their `A`."""
    ops = [op for op in table.ops if op.what == "A" and op.block in sizes]
    last, found = dict[int, int](), list[_Fill]()
    for number, (op, slot) in enumerate(zip(ops, ring([sizes[op.block] for op in ops]), strict=True)):
        found.append(_Fill(op, slot, last.get(slot, -1)))
        last[slot] = number
    return found


def _buffer_bytes(fills: Sequence[_Fill], sizes: Mapping[int, int]) -> int:
    most: dict[int, int] = {}
    for fill in fills:
        most[fill.slot] = max(most.get(fill.slot, 0), sizes[fill.op.block])
    return sum(most.values())


def _rows(ticks: Sequence[Tick], fills: Sequence[_Fill]) -> Iterator[Tick]:
    """The rows with the disk's ops, each as soon as earlier rows have all that it needs."""
    numbers = {fill.op: number for number, fill in enumerate(fills)}
    leaving = {(fill.op.block, fill.op.micro_batch): number for number, fill in enumerate(fills) if fill.leaves}
    loads = deque((number, leaving[fill.op.block, fill.op.micro_batch], fill.before)
                  for number, fill in enumerate(fills) if not fill.leaves)  # fmt: skip
    passed, ready, placed = {-1}, deque[int](), {-1}

    def place() -> Op:
        placed.add(number := ready.popleft())
        return fills[number].moved

    for tick in ticks:
        mine = [numbers[op] for op in tick.values() if op in numbers]
        for number in mine:
            while (fills[number].before if fills[number].leaves else number) not in placed:
                yield Tick(place())
        if ready and Stream.DISK in tick:
            yield Tick(place())
        yield tick.replaced(Stream.DISK, place()) if ready and Stream.DISK not in tick else tick
        passed.update(mine)
        ready.extend(number for number in mine if fills[number].leaves)
        while loads and passed.issuperset(loads[0][1:]):  # the E of these stand in earlier rows, or are ready
            ready.append(loads.popleft()[0])
