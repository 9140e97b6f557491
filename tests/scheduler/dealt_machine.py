"""An oracle for blocks that are dealt to devices: runs all tables at once in any order, on symbols instead of numbers.

A value is what computes it from what, and a gradient is the list of its terms in the order in which they were added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from random import Random
from typing import Any

from megatrain.scheduler.instructions import Instruction
from megatrain.scheduler.items import Item, Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.workload import Workload
from tests.scheduler.ledger import Harm

Terms = tuple[Any, ...]


def whole_name(name: str) -> str:
    """The value of the whole model, from its name on a device: see `tests.scheduler.dealing`."""
    return name.rpartition(" ")[2].partition(".")[0]


class Device:
    """One device, whose streams begin an op when its waits are over, and not before."""

    def __init__(self, number: int, schedule: Schedule, machine: Machine) -> None:
        self.number, self.schedule, self.machine = number, schedule, machine
        self.workload = schedule.known_workload()
        self.queues: dict[str, list[Instruction]] = {}
        self.over: set[Any] = set()
        self.running: list[Instruction] = []
        self.items: dict[Item, Terms] = {}
        self.parameters: dict[int, list[Terms]] = {}
        for instruction in schedule.instructions.all:
            self.queues.setdefault(instruction.position.stream, []).append(instruction)
        for micro, (index, value) in product(machine.numbers, enumerate(self.workload.values)):
            if value.is_there:
                self.items[Item("value", index, micro)] = ("input", whole_name(value.name), micro)

    def able(self) -> Iterator[Instruction]:
        for queue in self.queues.values():
            if queue and queue[0] not in self.running and all(wait in self.over for wait in queue[0].waits):
                if all(self.machine.is_full(lane) == takes for lane, takes in self.lanes(queue[0])):
                    yield queue[0]

    def lanes(self, instruction: Instruction) -> list[tuple[tuple[int, int, int], bool]]:
        """The rooms that an op empties or fills."""
        if instruction.op.what not in ("X", "D"):
            return []
        takes = instruction.position.stream == Stream.RECEIVE
        others = {crossing.device for _, crossing in self.moved(instruction)}
        ways: list[tuple[int, int]] = [
            (other, self.number) if takes else (self.number, other) for other in sorted(others)
        ]
        return [((sender, receiver, instruction.micro_batch), takes) for sender, receiver in ways]

    def moved(self, instruction: Instruction) -> list[tuple[int, Any]]:
        """The values that an X or D moves, each with its crossing."""
        op, takes = instruction.op, instruction.position.stream == Stream.RECEIVE
        found: list[tuple[int, Any]] = []
        for index, value in enumerate(self.workload.values):
            comes = [] if value.comes is None else [value.comes]
            for crossing in comes if takes == (op.what == "X") else value.goes:
                if op.block == (crossing.forward if op.what == "X" else crossing.backward):
                    found.append((index, crossing))
        return found

    def key(self, index: int) -> str:
        """The value of the whole model."""
        return whole_name(self.workload.values[index].name)

    def forward_kind(self, index: int) -> str:
        parked = {value for values in self.schedule.parked().values() for value in values}
        return "original" if index in parked else "value"

    def begin(self, instruction: Instruction) -> None:
        for item in instruction.frees_before:
            self.items.pop(item, None)
        self.running.append(instruction)
        if instruction.op.what in ("X", "D") and instruction.position.stream == Stream.SEND:
            for (sender, receiver, number), _ in self.lanes(instruction):
                kinds = [
                    "gradient" if instruction.op.what == "D" else self.forward_kind(i)
                    for i in range(len(self.workload.values))
                ]
                content = {
                    self.key(index): self.get(Item(kinds[index], index, number), instruction)
                    for index, crossing in self.moved(instruction)
                    if crossing.device == receiver
                }
                self.machine.filling[sender, receiver, number] = content

    def get(self, item: Item, instruction: Instruction) -> Terms:
        if item not in self.items:
            raise Harm(f"{instruction.op} of device {self.number} reads {item}, which isn't there")
        return self.items[item]

    def end(self, instruction: Instruction) -> None:
        op, number = instruction.op, instruction.micro_batch
        if op.what in ("X", "D"):
            self.transfer(instruction)
        elif op.what == "A":
            leaves = instruction.position.stream == Stream.D2H
            for value, _ in instruction.parked:
                source = Item("original" if leaves else "parked", value, number)
                self.items[Item("parked" if leaves else "returned", value, number)] = self.get(source, instruction)
        elif op.what == "F":
            self.forward(instruction)
        elif op.what == "B":
            self.backward(instruction)
        for item in instruction.frees_after:
            self.items.pop(item, None)
        self.running.remove(instruction)
        self.queues[instruction.position.stream].remove(instruction)
        self.over.add(instruction.position)

    def transfer(self, instruction: Instruction) -> None:
        for lane, takes in self.lanes(instruction):
            if not takes:
                self.machine.rooms[lane] = self.machine.filling.pop(lane)
                continue
            content = self.machine.rooms.pop(lane)
            for index, crossing in self.moved(instruction):
                if crossing.device == lane[0]:
                    kind = "gradient" if instruction.op.what == "D" else self.forward_kind(index)
                    self.items[Item(kind, index, lane[2])] = content.pop(self.key(index))
            if content:
                raise Harm(f"{instruction.op} leaves {list(content)} in the room")

    def forward(self, instruction: Instruction) -> None:
        block, number = instruction.op.block, instruction.micro_batch
        inputs = [(i, v) for i, v in enumerate(self.workload.values) if block in v.readers]
        read = tuple(
            sorted((self.key(i), self.get(Item(self.forward_kind(i), i, number), instruction)) for i, _ in inputs)
        )
        for index, value in enumerate(self.workload.values):
            if value.producer == block:
                made = ("F", self.workload.numbers[block], number, self.key(index), hash(read))
                self.items[Item(self.forward_kind(index), index, number)] = made

    def backward(self, instruction: Instruction) -> None:
        block, number = instruction.op.block, instruction.micro_batch
        whole, values = self.workload.numbers[block], list(enumerate(self.workload.values))
        parked = {value for found in self.schedule.parked().values() for value in found}
        if instruction.turns:
            for index, value in values:
                if value.is_output and self.workload.has_value_gradient(index):
                    self.items[Item("gradient", index, number)] = (("loss", number),)
        given = [
            (self.key(i), self.items.get(Item("gradient", i, number)))
            for i, v in values
            if v.producer == block and self.workload.has_value_gradient(i)
        ]
        for index, value in values:
            if block in value.readers:
                self.get(Item("returned" if index in parked else "value", index, number), instruction)
                if self.workload.has_value_gradient(index):
                    known = self.items.get(Item("gradient", index, number), ())
                    if not known and value.returning is not None:
                        raise Harm(f"{instruction.op} adds to nothing, before what comes")
                    self.items[Item("gradient", index, number)] = (*known, ("B", whole, number, hash(tuple(given))))
        self.machine.gradients[whole].append((number, hash(tuple(given))))


class Machine:
    """All devices, and the rooms between them.

    Attributes:
        rooms: What lies in each.
        filling: What is on its way there.
        gradients: What each backward got, by block, in the order in which parameters would be summed up.
    """

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self.numbers = range(schedules[0].kind.micro_batches)
        self.rooms: dict[tuple[int, int, int], dict[str, Terms]] = {}
        self.filling: dict[tuple[int, int, int], dict[str, Terms]] = {}
        total = sum(schedule.num_blocks for schedule in schedules)
        self.gradients: list[list[Any]] = [[] for _ in range(total)]
        self.devices = [Device(number, schedule, self) for number, schedule in enumerate(schedules)]

    def is_full(self, lane: tuple[int, int, int]) -> bool:
        return lane in self.rooms or lane in self.filling

    @property
    def is_over(self) -> bool:
        return not any(queue for device in self.devices for queue in device.queues.values())

    def starts(self) -> list[tuple[Device, Instruction]]:
        """What may begin."""
        return [(device, i) for device in self.devices for i in device.able()]

    def ends(self) -> list[tuple[Device, Instruction]]:
        """What may end."""
        return [
            (device, i)
            for device in self.devices
            for i in device.running
            if i.op.what not in ("X", "D") or i.position.stream == Stream.SEND or self._is_there(device, i)
        ]

    def run(self, random: Random) -> list[list[Any]]:
        while not self.is_over:
            starts = [(i, device.begin) for device, i in self.starts()]
            ends = [(i, device.end) for device, i in self.ends()]
            if not starts and not ends:
                raise Harm("all devices wait")
            instruction, does = random.choice([*starts, *ends])
            does(instruction)
        return self.gradients

    def _is_there(self, device: Device, instruction: Instruction) -> bool:
        return all(lane in self.rooms for lane, _ in device.lanes(instruction))


def of_one_process(whole: Workload, numbers: range) -> list[list[Any]]:
    """What each backward gets in one process, which runs all blocks one after the other."""
    items: dict[tuple[str, str, int], Any] = {}
    gradients: list[list[Any]] = [[] for _ in whole.blocks]
    for number in numbers:
        for block in reversed(whole.backward_blocks()):
            outputs = [i for i, v in enumerate(whole.values) if v.producer == block and whole.has_value_gradient(i)]
            for index in outputs:
                if whole.values[index].is_output and ("gradient", str(index), number) not in items:
                    items["gradient", str(index), number] = (("loss", number),)
            given = [(str(i), items.get(("gradient", str(i), number))) for i in outputs]
            for index, value in enumerate(whole.values):
                if block in value.readers and whole.has_value_gradient(index):
                    known = items.get(("gradient", str(index), number))
                    if known is None:
                        known = (("loss", number),) if value.is_output else ()
                    term = ("B", block, number, hash(tuple(given)))
                    items["gradient", str(index), number] = (*known, term)
            gradients[block].append((number, hash(tuple(given))))
    return gradients
