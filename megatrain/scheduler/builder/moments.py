"""Moments in a file: which blocks have their optimizer state there, and the ops of the disk around their updates.

Around the `U` of each such block stand an `R`, which reads the state into a buffer of host memory, and a `K`, which
writes the state back. Both are ops of one stream, `disk`, in the order of the updates: while the host updates one
block, the state of the one before is written, and then that of the next is read. So two blocks are in memory at a time,
and a buffer that is filled again has been written.

The blocks are chosen for a table that is made: no other op depends on them. As many are in the file as the host needs
room, and those are spread over the updates, so that the disk works while the host and the device do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.draft import with_figures
from megatrain.scheduler.items import Stream
from megatrain.scheduler.lifetimes import Books
from megatrain.scheduler.simulate import simulate_books
from megatrain.scheduler.table import Op, Table, Tick

# Of blocks of so many sizes, the largest ones, it is asked whether their state is worth a buffer as large.
_MOST_SIZES = 3
# How much of the state of updates in the next step is in the file, and how much of the others', of what both may have.
_MIXES = ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5), (0.25, 1.0), (1.0, 0.25), (0.0, 1.0), (1.0, 0.0))
# Which of some equal blocks is the first in the file: the sooner, the lower.
_MIDDLE, _PHASES = 0.5, (0.1, 1.0)
_HALVINGS = 30


def with_state_in_file(table: Table, nbytes: Sequence[int], least_bytes: int, machine: Hardware) -> Table:
    """Chooses the blocks whose optimizer state is in a file, and puts the ops of the disk into a table.

    Of the choices that spare enough memory it is one with a short simulated step: the state of large blocks, which
    needs large buffers, is in the file or isn't; the others are spread over the updates, with one share for those that
    are deferred, and one for those that aren't.

    Args:
        table: Made without the disk.
        nbytes: Of each block, the bytes of state that may be in a file.
        least_bytes: The memory of the host to be spared, buffers deducted. If no choice spares as much, it is one that
            spares most.
        machine: For the simulation.
    """
    sizes = {op.block: nbytes[op.block] for op in _updates(table) if nbytes[op.block] > 0}
    eligible = list(_eligible(sizes)) if least_bytes > 0 else []
    least = min(least_bytes, max(map(spared_bytes, eligible), default=0))
    if least <= 0:
        return table
    known: dict[tuple[int, ...], float] = {}

    def seconds(filed: Mapping[int, int]) -> float:
        key = tuple(filed)
        if key not in known:
            known[key] = simulate_books(Books(_with_ops(table, filed)), machine).step_s
        return known[key]

    deferred = frozenset(table.deferred)
    mixes = _MIXES if 0 < len(deferred.intersection(sizes)) < len(sizes) else _MIXES[:1]
    tried = [
        (found, candidates, mix)
        for candidates in eligible
        for mix in mixes
        if (found := _spread(candidates, deferred, mix, least, _MIDDLE)) is not None
    ]
    best, candidates, mix = min(tried, key=lambda each: (seconds(each[0]), sum(each[0].values())))
    others = (_spread(candidates, deferred, mix, least, phase) for phase in _PHASES)
    best = min([best, *(each for each in others if each is not None)], key=seconds)
    return with_moments(table, best)


def _eligible(sizes: Mapping[int, int]) -> Iterator[Mapping[int, int]]:
    """All blocks, and those without the largest, of which one or two may need a buffer as large as they spare."""
    for most in sorted(set(sizes.values()), reverse=True)[:_MOST_SIZES]:
        yield {block: size for block, size in sizes.items() if size <= most}


def _spread(
    sizes: Mapping[int, int], deferred: Collection[int], mix: tuple[float, float], least: int, phase: float
) -> Mapping[int, int] | None:
    """The fewest of some blocks, spread evenly over the updates, that spare the memory; None if not even all do.

    Args:
        sizes: In the order of the updates.
        deferred: Blocks whose updates are those of the previous step.
        mix: The share of the state in the file of deferred updates, and of others, where one of them has all.
        least: The bytes to be spared.
        phase: See `_PHASES`.
    """

    def chosen(part: float) -> Mapping[int, int]:
        # A part up to 1 of what the mix says, and then of what it leaves out.
        shares = [min(1.0, part * share) if part <= 1 else share + (1 - share) * (part - 1) for share in mix]
        found, owed = dict[int, int](), [0.0, 0.0]
        for block, size in sizes.items():
            region = int(block not in deferred)
            owed[region] += shares[region] * size
            if shares[region] and owed[region] >= phase * size:
                found[block] = size
                owed[region] -= size
        return found

    low, high, found = 0.0, 2.0, chosen(2.0)
    if spared_bytes(found) < least:
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fewer = chosen(middle)
        if spared_bytes(fewer) >= least:
            high, found = middle, fewer
        else:
            low = middle
    return found


def spared_bytes(sizes: Mapping[int, int]) -> int:
    """The memory of the host that isn't needed if the state of so many bytes is in a file, in the order of updates."""
    buffers: dict[int, int] = {}
    for size, buffer in zip(sizes.values(), ring(list(sizes.values())), strict=True):
        buffers[buffer] = max(buffers.get(buffer, 0), size)
    return sum(sizes.values()) - sum(buffers.values())


def spared_in_file(table: Table) -> int:
    """The memory of the host that a table spares by state in a file."""
    blocks = table.known_workload().blocks
    return spared_bytes({op.block: n for op in _updates(table) if (n := blocks[op.block].moment_bytes) > 0})


def _updates(table: Table) -> Sequence[Op]:
    return [op for op in table.ops if op.stream == Stream.HOST and op.what == "U"]


def with_moments(table: Table, nbytes: Mapping[int, int]) -> Table:
    """Puts the ops of the disk into a table: the state of some blocks, so many bytes of each, is in a file.

    Other ops keep their order. A row is added where the disk has no free one before an update. Blocks that the host
    doesn't update count for nothing.

    >>> from megatrain.scheduler.builder.build import build
    >>> from megatrain.scheduler.step_kind import StepKind
    >>> from megatrain.scheduler.workload import BlockWork, Workload
    >>> layer = BlockWork("layer", 1024, 1024, 0, 0, 0, True, update_bytes=64)
    >>> made = build(Workload((layer, layer), (), ()), StepKind(updates="overlap", outputs="release"), num_slots=2)
    >>> print(*with_moments(made, {0: 4096, 1: 4096}).ops)
    W0@0 R1@0 W1@1 F0 R0@1 F1 B1 B0 G1 G0 U1 U0 K1 K0
    """
    filed = {op.block: nbytes[op.block] for op in _updates(table) if nbytes.get(op.block, 0) > 0}
    return with_figures(_with_ops(table, filed)) if filed else table


def _with_ops(table: Table, filed: Mapping[int, int]) -> Table:
    """The table with bytes of the state of some blocks, in the order of their updates, in a file."""
    workload = table.known_workload()
    blocks = tuple(replace(block, moment_bytes=filed.get(b, 0)) for b, block in enumerate(workload.blocks))
    buffers = ring([*filed.values()])
    reads = [Op(Stream.DISK, "R", block, slot=buffer) for block, buffer in zip(filed, buffers, strict=True)]
    return replace(table, ticks=tuple(_rows(table.ticks, reads)), workload=replace(workload, blocks=blocks))


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
