"""Case: a table under check, with lookups and errors for the rules."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from megatrain.base.counts import counted
from megatrain.base.sizes import PAGE, aligned
from megatrain.errors import ScheduleError
from megatrain.scheduler.dependency import Clocks
from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Op, Position, Table
from megatrain.scheduler.text import table_rows
from megatrain.scheduler.workload import Workload

_WINDOW = 2
# Stated a second time, because the checker shares nothing with the table of effects.
_PER_MICRO_BATCH = "FBAXDEL"


class Case:
    """One schedule under check.

    Args:
        schedule: The table.
        workload: The workload that it claims to run.
        waits: For each position, the positions in other streams that it waits for.
    """

    def __init__(self, schedule: Table, workload: Workload, waits: Mapping[Position, Sequence[Position]]) -> None:
        self.schedule = schedule
        self.workload = workload
        self.clocks = Clocks(waits)
        self.ops: list[tuple[Position, Op]] = list(schedule.positions())
        self.saved, self.keeping = frozenset(schedule.saves), frozenset(schedule.results)
        self.parked = _expected_parks(schedule, workload)
        self.evicted = {op.block for _, op in self.ops if op.stream == Stream.DISK and op.what in "EL"}
        self.micro_batches = range(schedule.kind.micro_batches)
        self._computes = [position.tick for position, _ in self.ops if position.stream == Stream.COMPUTE]
        self._first_offload = min((p for p, op in self.ops if op.what == "G"), default=None)
        self._at: dict[tuple[Stream, str, int, int], list[Position]] = {}
        for position, op in self.ops:
            self._at.setdefault((op.stream, op.what, op.block, op.micro_batch or 0), []).append(position)

    def held_bytes(self, block: int) -> int:
        """Bytes that a block has in its slot: its state, and that of the optimizer where the device updates it."""
        work = self.workload.blocks[block]
        return work.state_bytes + (work.optimizer_bytes if block in self.schedule.device_updates else 0)

    def chunk_bytes(self, block: int) -> int:
        """Bytes of a buffer, or of a file, with the parked values of a block and micro-batch: whole pages."""
        sizes = (aligned(self.workload.values[value].nbytes) for value in self.parked.get(block, ()))
        return aligned(sum(sizes), PAGE)

    def buffers(self) -> dict[int, range]:
        """Where in their memory the buffers are through which values go to a file: one behind the other."""
        sizes: dict[int, int] = {}
        for position, op in self.ops:
            if position.stream == Stream.DISK and op.what in "EL" and op.slot is not None:
                sizes[op.slot] = max(sizes.get(op.slot, 0), self.chunk_bytes(op.block))
        starts = accumulate((sizes[slot] for slot in sorted(sizes)), initial=0)
        return {slot: range(start, start + sizes[slot]) for slot, start in zip(sorted(sizes), starts, strict=False)}

    def at(self, stream: Stream, what: str, block: int, micro_batch: int = 0) -> list[Position]:
        """All positions of one op, ascending; an op that has no micro-batch counts as one of the first."""
        return self._at.get((stream, what, block, micro_batch), [])

    def is_deferred(self, block: int) -> bool:
        """Whether the update of a block uses the gradients of the previous step."""
        if self.schedule.kind.updates != "spread":
            return self.schedule.kind.updates == "deferred"
        first = self._first_offload
        return first is not None and any(update < first for update in self.at(Stream.HOST, "U", block))

    def gradient_users(self, block: int) -> list[Position]:
        """What uses a block's gradients on the device last: its G, or the U and the S where the device updates it."""
        if block not in self.schedule.device_updates:
            return self.at(Stream.D2H, "G", block)
        return [*self.at(Stream.COMPUTE, "U", block), *self.at(Stream.D2H, "S", block)]

    def updates_of(self, block: int) -> list[int]:
        """The blocks whose update uses the gradients of a block."""
        return [b for b, work in enumerate(self.workload.blocks) if work.update_bytes and block in (b, *work.shares)]

    def forward(self, block: int, micro_batch: int) -> Position:
        """The F of a block, once it is known that there is one."""
        return self.at(Stream.COMPUTE, "F", block, micro_batch)[0]

    def backward(self, block: int, micro_batch: int) -> Position:
        """The B of a block, once it is known that there is one."""
        return self.at(Stream.COMPUTE, "B", block, micro_batch)[0]

    def backwards(self, block: int) -> list[Position]:
        """The B of a block of every micro-batch, once it is known that there are."""
        return [self.backward(block, number) for number in self.micro_batches]

    def is_there(self, value: int) -> bool:
        """Whether the step has a value at all: results it has only of blocks that keep theirs."""
        work = self.workload.values[value]
        return not work.is_result or work.producer in self.keeping

    def weight_readers(self, members: Iterable[int]) -> Iterator[Position]:
        """All that reads the parameters of some blocks in host memory: W, or F and B where they are used in place."""
        for member in members:
            yield from self.at(Stream.H2D, "W", member)
            if self.schedule.kind.transfer == "bind":
                for number in self.micro_batches:
                    yield from self.at(Stream.COMPUTE, "F", member, number)
                    yield from self.at(Stream.COMPUTE, "B", member, number)

    def taker_of(self, transfer: Position) -> Position | None:
        """The op of compute with which memory is taken for what returns: the last of an earlier tick, if any."""
        first = bisect_left(self._computes, transfer.tick)
        return Position(self._computes[first - 1], Stream.COMPUTE) if first else None

    def op(self, position: Position) -> Op:
        """The op that stands somewhere."""
        return self.schedule.ticks[position.tick][position.stream]

    def name(self, position: Position) -> str:
        """An op and where it stands, for messages."""
        return f"{position.stream}:{self.op(position)} at tick {position.tick}"

    def once(self, stream: Stream, what: str, block: int, rule: str, micro_batch: int = 0) -> Position:
        """The only position of an op that must occur exactly once."""
        found = self.at(stream, what, block, micro_batch)
        if len(found) != 1:
            times = "is missing" if not found else f"occurs {counted(len(found), 'time')}"
            near = found[-1].tick if found else len(self.schedule.ticks) - 1
            number = micro_batch if self.has_number(what) else None
            op = f"{what}{'' if block < 0 else block}{'' if number is None else f'.{number}'}"
            raise self.fault(f"{stream}:{op} {times}.", rule, near, "Have it once.")
        return found[0]

    def never(self, stream: Stream, what: str, block: int, why: str, rule: str, micro_batch: int = 0) -> None:
        """Demands that an op doesn't occur."""
        for position in self.at(stream, what, block, micro_batch):
            raise self.fault(f"{self.name(position)} {why}.", rule, position.tick, "Remove it.")

    def has_number(self, what: str) -> bool:
        """Tells whether such an op names its micro-batch."""
        return self.schedule.kind.micro_batches > 1 and what in _PER_MICRO_BATCH

    def require_before(self, first: Position, then: Position, why: str, rule: str) -> None:
        """Demands that `first` is done when `then` starts, by streams and waits alone."""
        if not self.clocks.is_before(first, then):
            raise self.fault(
                f"{self.name(then)} {why} {self.name(first)}, which may not be done by then.",
                rule,
                then.tick,
                f"Move it below tick {first.tick}, or add the wait.",
            )

    def fault(self, what: str, rule: str, tick: int, way_out: str) -> ScheduleError:
        """An error that names the rule, with the rows around a tick as its note."""
        error = ScheduleError(f"{what}\n  {rule}\n  {way_out}")
        rows = table_rows(self.schedule.ticks, self.schedule.live_bytes, self.schedule.saves)
        window = range(max(0, tick - _WINDOW), min(len(self.schedule.ticks), tick + _WINDOW + 1))
        lines = [f"    {rows[0]}", *(f"{'  > ' if t == tick else '    '}{rows[t + 1]}" for t in window)]
        error.add_note("\n".join(line.rstrip() for line in lines))
        return error


def _expected_parks(schedule: Table, workload: Workload) -> dict[int, list[int]]:
    """Values that have to be parked, by the last block whose backward reads them."""
    backwards = [i for i, block in enumerate(workload.blocks) if block.has_backward]
    if schedule.kind.transfer == "bind" or schedule.kind.mode == "forward" or not backwards:
        return {}
    found: dict[int, list[int]] = {}
    for index, value in enumerate(workload.values):
        readers = value.readers
        if value.is_result and value.producer is not None:
            readers = (value.producer,) if value.producer in schedule.results else ()
        users = [b for b in readers if workload.blocks[b].has_backward]
        holders = {*users, value.producer}
        is_old = bool(users) and backwards[-1] - users[-1] >= schedule.keep
        if value.is_parkable and is_old and not holders.intersection(schedule.saves):
            found.setdefault(users[-1], []).append(index)
    return found
