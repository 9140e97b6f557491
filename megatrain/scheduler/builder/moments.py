"""with_moments(): puts the reads and writes of optimizer state that lies in a file around the updates of a table.

Around the `U` of each block whose state a file has stand an `R`, which reads the state into a buffer of host memory,
and a `K`, which writes the state back. Both are ops of one stream, `disk`, in the order of the updates: while the host
updates one block, the state of the one before is written, and then that of the next is read. So two blocks are in
memory at a time, and a buffer that is filled again has been written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatrain.scheduler.builder.draft import with_figures
from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Op, Table, Tick


def with_moments(table: Table) -> Table:
    """Puts the ops of the disk into a table; a table without such blocks, or with these ops, stays as it is.

    Other ops keep their order. A row is added where the disk has no free one before an update.

    >>> from megatrain.scheduler.builder.build import build
    >>> from megatrain.scheduler.step_kind import StepKind
    >>> from megatrain.scheduler.workload import BlockWork, Workload
    >>> layer = BlockWork("layer", 1024, 1024, 0, 0, 0, True, update_bytes=64, moment_bytes=4096)
    >>> made = build(Workload((layer, layer), (), ()), StepKind(updates="overlap", outputs="release"), num_slots=2)
    >>> print(*with_moments(made).ops)
    W0@0 R1@0 W1@1 F0 R0@1 F1 B1 B0 G1 G0 U1 U0 K1 K0
    """
    blocks = table.known_workload().blocks
    updated = [op.block for op in table.ops if op.stream == Stream.HOST and op.what == "U"]
    filed = [block for block in updated if blocks[block].moment_bytes > 0]
    if not filed or any(op.stream == Stream.DISK for op in table.ops):
        return table
    buffers = ring([blocks[block].moment_bytes for block in filed])
    reads = [Op(Stream.DISK, "R", block, slot=buffer) for block, buffer in zip(filed, buffers, strict=True)]
    return with_figures(replace(table, ticks=tuple(_rows(table.ticks, reads))))


def ring(sizes: Sequence[int]) -> list[int]:
    """Chooses a buffer for each of some states, of which two that follow each other are in memory at the same time.

    The largest choose first, so that the few that are much larger than others share a buffer: two buffers, or three.

    >>> ring([9, 2, 2, 2, 9])
    [0, 1, 0, 1, 0]
    >>> ring([9, 2, 2, 9])
    [0, 1, 2, 0]
    """
    chosen: dict[int, int] = {}
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        taken = {chosen.get(place - 1), chosen.get(place + 1)}
        chosen[place] = next(buffer for buffer in range(3) if buffer not in taken)
    return [chosen[place] for place in range(len(sizes))]


def buffer_bytes(table: Table) -> Mapping[int, int]:
    """The bytes of each buffer of host memory that the disk's ops fill: as many as the largest state that it holds."""
    blocks, found = table.known_workload().blocks, dict[int, int]()
    for op in table.ops:
        if op.stream == Stream.DISK and op.what == "R" and op.slot is not None:
            found[op.slot] = max(found.get(op.slot, 0), blocks[op.block].moment_bytes)
    return dict(sorted(found.items()))


def _rows(ticks: Sequence[Tick], reads: Sequence[Op]) -> list[Tick]:
    """The rows with the disk's ops: R1 R2, and after each update its K and the R of the next but one."""
    places = {read.block: place for place, read in enumerate(reads)}
    pending, rows, number_read = deque(reads[:2]), list[Tick](), 0
    for tick in ticks:
        host = tick.host
        place = places.get(host.block, -1) if host is not None and host.what == "U" else -1
        while number_read <= place:  # the update's own state comes first
            rows.append(Tick(pending.popleft()))
            number_read += rows[-1][Stream.DISK].what == "R"
        if pending:
            tick = tick.replaced(Stream.DISK, pending.popleft())
            number_read += tick[Stream.DISK].what == "R"
        rows.append(tick)
        if place >= 0:
            pending.append(Op(Stream.DISK, "K", reads[place].block))
            pending.extend(reads[place + 2 : place + 3])
    return [*rows, *map(Tick, pending)]
