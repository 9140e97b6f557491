"""An oracle of weights in shards: runs two ranks' tables in any order that streams, waits and collectives allow."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from megatrain.scheduler.dependency import derive_waits
from megatrain.scheduler.items import Stream
from megatrain.scheduler.op import Op
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.table import Position
from megatrain.sizes import gathered_bytes
from tests.scheduler.ledger import Harm


class _Rank:
    """The device of a rank: what lies in which bytes of its arena. A `W` fills a part, a `C` the rest."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.blocks = schedule, schedule.known_workload().blocks
        self.waits, self.ops = derive_waits(schedule), dict(schedule.positions())
        self.bindings = schedule.bindings()
        self.queues: dict[Stream, list[Position]] = {}
        for position in self.ops:
            self.queues.setdefault(position.stream, []).append(position)
        self.done: set[Position] = set()
        self.running: set[Position] = set()
        # By the first and the last byte: the block, and whether it is whole.
        self.lying: dict[tuple[int, int], tuple[int, bool]] = {}
        self.reading: dict[Position, tuple[int, int]] = {}

    def able(self) -> list[Position]:
        """Ops that can start."""
        heads = [queue[0] for queue in self.queues.values() if queue and queue[0] not in self.running]
        return [p for p in heads if all(w in self.done for w in self.waits.get(p, ()))]

    def where(self, op: Op) -> tuple[int, int]:
        assert op.slot is not None
        start = self.schedule.slots[op.slot].offset
        return start, start + self.blocks[op.block].state_bytes

    def start(self, position: Position) -> None:
        op = self.ops[position]
        self.running.add(position)
        if op.what == "W":
            mine = self.where(op)
            for theirs in list(self.lying):
                if theirs[0] < mine[1] and mine[0] < theirs[1]:
                    if theirs in self.reading.values():
                        raise Harm(f"{op} overwrites what somebody reads")
                    del self.lying[theirs]
            self.lying[mine] = op.block, False
            self.reading[position] = mine
        elif op.what == "C":
            mine = self.where(op)
            if self.lying.get(mine) != (op.block, False) or mine in self.reading.values():
                raise Harm(f"{op} gathers where its shard isn't")
            self.reading[position] = mine
        elif op.what in "FB" and self.blocks[op.block].state_bytes:
            needs_gather = gathered_bytes(self.blocks[op.block].state_bytes, self.schedule.kind.shards) > 0
            load = self.bindings.get(position)
            mine = (-1, -1) if load is None else self.where(self.ops[load])
            if self.lying.get(mine) != (op.block, needs_gather) or not self._is_read(mine):
                raise Harm(f"{op} has no weights")
            self.reading[position] = mine

    def _is_read(self, where: tuple[int, int]) -> bool:
        """Whether nobody but F and B is at work there."""
        return all(self.ops[p].what in "FB" for p, at in self.reading.items() if at == where)

    def end(self, position: Position) -> None:
        op = self.ops[position]
        if op.what == "C":
            self.lying[self.where(op)] = op.block, True
        self.reading.pop(position, None)
        self.running.discard(position)
        self.queues[position.stream].remove(position)
        self.done.add(position)


def run(schedules: Sequence[Schedule], random: Random) -> None:
    """Runs one step of ranks of one host; a `Harm` if something goes wrong, or nothing goes on."""
    ranks = [_Rank(schedule) for schedule in schedules]
    while any(queue for rank in ranks for queue in rank.queues.values()):
        able = [(rank, p) for rank in ranks for p in rank.able() if rank.ops[p].what != "C"]
        gathers = [[p for p in rank.able() if rank.ops[p].what == "C"] for rank in ranks]
        ends = [(rank, p) for rank in ranks for p in rank.running]
        choices: list[str] = ["start"] * bool(able) + ["end"] * bool(ends) + ["gather"] * all(gathers)
        if not choices:
            raise Harm("nobody goes on")
        choice = random.choice(choices)
        if choice == "start":
            rank, position = random.choice(able)
            rank.start(position)
        elif choice == "gather":
            blocks = {rank.ops[found[0]].block for rank, found in zip(ranks, gathers, strict=True)}
            if len(blocks) > 1:
                raise Harm(f"ranks gather different blocks: {sorted(blocks)}")
            for rank, found in zip(ranks, gathers, strict=True):
                rank.start(found[0])
        else:
            rank, position = random.choice(ends)
            mates = [(each, p) for each, p in ends if each.ops[p].what == "C"]
            for each, p in mates if rank.ops[position].what == "C" else [(rank, position)]:
                each.end(p)
