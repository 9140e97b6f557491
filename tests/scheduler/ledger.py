"""The oracle's books of the host: versions of parameters and gradients, and who is at work on which."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Op, Position

if TYPE_CHECKING:
    from tests.scheduler.symbolic import Machine


class Harm(AssertionError):
    """Something a real step would have got wrong."""


def op_name(position: Position, op: Op) -> str:
    if op.what in "WGSNU" and op.micro_batch is not None:
        raise Harm(f"{op} of one micro-batch")
    is_other = (op.what, position.stream) in (("A", Stream.D2H), ("U", Stream.COMPUTE), ("S", Stream.D2H))
    return f"{op.what}{op.block}.{op.micro_batch or 0}{'>' if is_other else ''}"


class Ledger:
    """What the host holds. A parameter belongs to the block that updates it; other blocks may share it.

    A deferred step begins with gradients, and a norm, of the step before; it must use all of these, and read
    only parameters that are updated. Any other step must read only parameters that aren't.
    """

    def __init__(self, machine: Machine) -> None:
        schedule, self.blocks = machine.schedule, machine.workload.blocks
        self.is_serial = schedule.kind.updates == "serial"
        self.is_bound = schedule.kind.transfer == "bind"
        self.clip, self.reports = schedule.kind.clip, schedule.kind.reports_norm
        has_updates = schedule.kind.updates != "none"
        # Gradients leave when all parameters were read, so an update of the previous step's stands above the first G.
        first = min((p.tick for p, op in schedule.positions() if op.what == "G"), default=0)
        heads = {
            op.block for p, op in schedule.positions() if p.stream == Stream.HOST and op.what == "U" and p.tick < first
        }
        there = set(schedule.device_updates)
        self.updating = {b for b, work in enumerate(self.blocks) if work.update_bytes and has_updates} - there
        self.deferred = {"deferred": self.updating, "spread": heads}.get(schedule.kind.updates, set[int]())
        self.groups = {b: {b, *self.blocks[b].shares} for b in self.updating}
        self.offloading = {b for b in machine.backwards if self.blocks[b].gradient_bytes} - there
        self.new_gradients: set[int] = set()
        self.updated: set[int] = set()
        self.at_work: set[int] = set()
        self.readers: Counter[int] = Counter()
        self.squared: set[int] = set()
        self.there = there if self.clip or self.reports else set[int]()  # whose norms the device takes
        self.has_new_norm = False
        self.places = {place.block: place for place in schedule.places}
        self.waiting, self.most_waiting = Counter[tuple[str, int]](), self.room_to_wait(machine)
        for block in self.offloading:
            if self.owners(block) & self.deferred:
                self.waiting["old", block] = self.blocks[block].gradient_bytes

    def room_to_wait(self, machine: Machine) -> int | None:
        """Host bytes that are left for gradients without places; None if they aren't counted."""
        return machine.schedule.host_bytes if machine.schedule.kind.holds_gradients and self.is_bound else None

    def expect_free_place(self, op: Op) -> None:
        """Those of the step before lie in the same places."""
        mine = self.places.get(op.block)
        for _, other in self.waiting if mine is not None else ():
            theirs = self.places[other]
            is_overwritten = mine.offset < theirs.offset + theirs.nbytes and theirs.offset < mine.offset + mine.nbytes
            self.expect(not is_overwritten, f"{op} overwrites gradients of block {other} that wait")

    def expect(self, condition: bool, harm: str) -> None:
        if not condition:
            raise Harm(harm)

    def owners(self, block: int) -> set[int]:
        """Blocks whose updates write parameters that a block holds."""
        return {owner for owner, group in self.groups.items() if block in group}

    def reads_parameters(self, op: Op) -> bool:
        return op.what == "W" or (self.is_bound and op.what in "FB")

    def expect_version(self, op: Op) -> None:
        owners = self.owners(op.block)
        self.expect(not owners & self.at_work, f"{op} reads what is being written")
        self.expect(owners & self.updated == owners & self.deferred, f"{op} reads parameters of another step")

    def start(self, op: Op) -> None:
        if self.reads_parameters(op):
            self.expect_version(op)
            self.readers[op.block] += 1
        elif op.what == "G":
            needed = self.owners(op.block) & self.deferred
            self.expect(needed <= self.updated, f"{op} replaces gradients that are still needed")
            self.expect_free_place(op)
            self.waiting["new", op.block] = self.blocks[op.block].gradient_bytes
            if self.most_waiting is not None:
                self.expect(self.waiting.total() <= self.most_waiting, f"too many gradients wait when {op} starts")
        elif op.what == "S":
            self.expect(self.clip, f"{op} for nobody")
            self.expect(op.block in self.new_gradients, f"{op} without its gradients")
            self.expect(op.block not in self.squared, f"{op} twice")
        elif op.what == "N":
            self.expect(self.clip or self.reports, "a norm for nobody")
            summing = self.there | (self.offloading if self.clip else self.updating)
            summed = self.squared | (set[int]() if self.clip else self.updated)
            self.expect(summed == summing, "N without the squares of all gradients")
            if self.deferred:
                self.expect(self.updated == self.updating, "N replaces a norm that is still needed")
        elif op.what == "U":
            self.start_update(op)

    def start_update(self, op: Op) -> None:
        self.expect(op.block in self.updating, f"{op} updates nothing")
        self.expect(op.block not in self.updated | self.at_work, f"{op} twice")
        group = self.groups[op.block]
        self.expect(not any(self.readers[member] for member in group), f"{op} writes what is being read")
        if op.block in self.deferred:
            self.expect(not group & self.new_gradients, f"{op} reads gradients of another step")
            self.expect(not self.has_new_norm, f"{op} reads the norm of another step")
        else:
            self.expect(group & self.offloading <= self.new_gradients, f"{op} without its gradients")
            self.expect(not self.clip or self.has_new_norm, f"{op} without the norm")
            if self.is_serial:
                self.expect(self.new_gradients == self.offloading, f"{op} isn't serial")
        self.at_work.add(op.block)

    def finish(self, op: Op) -> None:
        if self.reads_parameters(op):
            self.expect_version(op)
            self.readers[op.block] -= 1
        elif op.what == "G":
            self.new_gradients.add(op.block)
        elif op.what == "S":
            self.squared.add(op.block)
        elif op.what == "N":
            self.has_new_norm = True
        elif op.what == "U":
            self.at_work.discard(op.block)
            self.updated.add(op.block)
            for member in self.groups[op.block]:
                if self.owners(member) <= self.updated:
                    del self.waiting["old" if op.block in self.deferred else "new", member]

    def check_end(self) -> None:
        self.expect(self.updated == self.updating, "an update never ran")
        self.expect(self.has_new_norm == (self.clip or self.reports), "the norm is missing")
