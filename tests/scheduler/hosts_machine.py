"""An oracle for hosts that each deal the blocks to their devices: runs the tables of all in any order, on symbols."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from megatrain.scheduler.instructions import Instruction
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.workload import Workload
from tests.scheduler.dealt_machine import Device, Machine, of_one_process
from tests.scheduler.ledger import Harm

Terms = list[Any]


class Running(NamedTuple):
    """An op of a host, by its letter and the block of the whole model."""

    host: int
    device: Device
    instruction: Instruction

    @property
    def key(self) -> tuple[str, int]:
        return self.instruction.op.what, self.device.workload.numbers[self.instruction.op.block]


class Hosts:
    """All hosts. A transfer from host to host begins on both before it ends on either.

    Attributes:
        totals: Per host and block the terms of the sum, in their order.
    """

    def __init__(self, hosts: Sequence[Sequence[Schedule]]) -> None:
        self.machines = [Machine(schedules) for schedules in hosts]
        self.adds = [{numbers(s)[op.block] for s in schedules for op in s.ops if op.what == "R"} for schedules in hosts]
        self.given: dict[tuple[int, int], Terms] = {}
        self.received: dict[tuple[int, int], Terms] = {}
        self.totals: list[dict[int, Terms]] = [{} for _ in hosts]

    def run(self, random: Random) -> list[dict[int, Terms]]:
        while not all(machine.is_over for machine in self.machines):
            starts = [(self._begin, [Running(h, *each)]) for h, m in enumerate(self.machines) for each in m.starts()]
            ends = [(self._end, together) for together in self._ends()]
            if not starts and not ends:
                raise Harm("all hosts wait")
            does, found = random.choice([*starts, *ends])
            for each in found:
                does(each)
        return self.totals

    def _ends(self) -> Iterator[list[Running]]:
        """What may end, with what ends at the same time."""
        running = [Running(h, *each) for h, machine in enumerate(self.machines) for each in machine.ends()]
        known = {(each.host, *each.key): each for each in running}
        for each in running:
            what, block = each.key
            if what not in ("P", "R", "G"):
                yield [each]
            elif what == "P" and (each.host + 1, "R", block) in known:
                yield [each, known[each.host + 1, "R", block]]
            elif what == "G" and each.host == 0:
                partners = [known.get((host, "G", block)) for host in range(len(self.machines))]
                if all(partners):
                    yield [partner for partner in partners if partner is not None]

    def _begin(self, each: Running) -> None:
        what, block = each.key
        sums = self.machines[each.host].gradients[block]
        if what == "P" or (what == "G" and each.host == len(self.machines) - 1):
            self.given[each.host, block] = list(sums)
        if what == "B" and each.instruction.micro_batch == 1 and block in self.adds[each.host]:
            if (each.host, block) not in self.received:
                raise Harm(f"{each.instruction.op} of host {each.host} adds to a sum that isn't there")
            sums[:0] = self.received[each.host, block]
        each.device.begin(each.instruction)

    def _end(self, each: Running) -> None:
        what, block = each.key
        if what == "R":
            self.received[each.host, block] = self.given[each.host - 1, block]
        elif what == "G":
            self.totals[each.host][block] = self.given[len(self.machines) - 1, block]
        each.device.end(each.instruction)


def numbers(schedule: Schedule) -> Sequence[int]:
    return schedule.known_workload().numbers


def totals_of_one_process(whole: Workload, micro_batches: Sequence[int]) -> dict[int, Terms]:
    """The terms of each block's sum, host by host."""
    parts = [of_one_process(whole, range(number)) for number in micro_batches]
    return {
        block: [term for part in parts for term in part[block]]
        for block, work in enumerate(whole.blocks)
        if work.gradient_bytes
    }
