"""An oracle: runs a table on symbols, in any order that the streams and the waits allow, and looks for harm.

It knows nothing of ticks beyond the order of each stream, and keeps its own books of what is where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from megatrain.scheduler.effects import streams
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Op, Position
from megatrain.scheduler.workload import Workload
from tests.scheduler.ledger import Harm, Ledger, op_name

Waits = Mapping[Position, Sequence[Position]]


# Kind, number of a value or block, micro-batch.
Key = tuple[str, int, int]


def is_there(position: Position, op: Op) -> bool:
    """Whether it is an op of a block that the device updates, of which the ledger of the host knows nothing."""
    return (op.what, position.stream) in (("U", Stream.COMPUTE), ("S", Stream.D2H))


def taken_after(schedule: Schedule) -> dict[Position, list[Op]]:
    """The `A` whose memory is taken when an op of compute is over: the last one of an earlier tick."""
    found: dict[Position, list[Op]] = {}
    latest: Position | None = None
    for tick, row in enumerate(schedule.ticks):
        if latest is not None and row.h2d is not None and row.h2d.what == "A":
            found.setdefault(latest, []).append(row.h2d)
        latest = latest if row.compute is None else Position(tick, Stream.COMPUTE)
    return found


@dataclass
class Machine:
    """The device and the host of one run."""

    schedule: Schedule
    workload: Workload
    bindings: Mapping[Position, Position] = field(init=False)
    parked: dict[int, tuple[int, ...]] = field(init=False)
    # Per W that was run: its byte range, and whether the copy is complete. What is overwritten is gone.
    weights: dict[Position, tuple[int, int, bool]] = field(default_factory=dict)
    # Tensors on the device, with the storage that holds them and its bytes; True once their content is there.
    tensors: dict[Key, tuple[object, int]] = field(default_factory=dict)
    ready: set[Key] = field(default_factory=set)
    needed: dict[Key, Counter[str]] = field(default_factory=dict)
    host: set[tuple[int, int]] = field(default_factory=set)
    # Parked values in a file, by block and micro-batch; what is in each buffer, and whether all of it is there.
    file: set[tuple[int, int]] = field(default_factory=set)
    buffers: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
    given: Counter[tuple[int, int]] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    workspace: int = 0

    @property
    def kind(self) -> StepKind:
        return self.schedule.kind

    def __post_init__(self) -> None:
        self.bindings = self.schedule.bindings()
        self.parked = self.schedule.parked()
        disk = [(op, op.block, op.micro_batch or 0) for op in self.schedule.ops if op.what in ("E", "L")]
        self.slots = {(op.what, block, number): op.slot for op, block, number in disk}
        self.numbers = range(self.kind.micro_batches)
        self.backwards = set() if self.kind.mode == "forward" else set(self.workload.backward_blocks())
        self.parked_values = {v: k for k, values in self.parked.items() for v in values}
        self.ledger = Ledger(self)
        self.taken_after = taken_after(self.schedule)
        # Where the frozen weights of persistent blocks lie from the first step on.
        self.staying: dict[int, tuple[int, int]] = {}
        for _, op in self.schedule.positions():
            stays = op.block in (*self.schedule.persistent, *self.schedule.device_updates)
            if op.what == "W" and stays and op.slot is not None:
                offset = self.schedule.slots[op.slot].offset
                self.staying[op.block] = offset, offset + self.slot_bytes(op.block)
        is_backward = self.kind.mode == "backward"
        for index, value in enumerate(self.workload.values):
            for number in self.numbers:
                if is_backward and index in self.parked_values:
                    self.host.add((index, number))
                elif value.producer is None or is_backward:
                    self.allocate_value(index, number, is_there=True)
                if is_backward and value.is_output and self.workload.has_value_gradient(index):
                    self.allocate_gradient(index, number)
        if is_backward:
            for block in self.schedule.saves:
                self.allocate(("saved", block, 0), self.workload.blocks[block].saved_bytes, [f"B{block}.0"])

    def slot_bytes(self, block: int) -> int:
        """Bytes of a block in its slot: weights, and behind them what an optimizer has there."""
        work = self.workload.blocks[block]
        return work.state_bytes + work.optimizer_bytes * (block in self.schedule.device_updates)

    # What lives on the device.

    def allocate(self, key: Key, nbytes: int, needed: Sequence[str], *, storage: object = None) -> None:
        if key in self.tensors:
            raise Harm(f"{key} is made twice")
        self.tensors[key] = (key if storage is None else ("storage", storage), nbytes)
        self.needed[key] = Counter(needed)
        self.ready.add(key)

    def readers(self, index: int) -> tuple[int, ...]:
        """Blocks whose backward reads a value: a result is its own block's, if that keeps it."""
        value = self.workload.values[index]
        if not value.is_result:
            return tuple(block for block in value.readers if block in self.backwards)
        return tuple(b for b in self.schedule.results if b == value.producer and b in self.backwards)

    def is_there(self, index: int) -> bool:
        return not self.workload.values[index].is_result or bool(self.readers(index))

    def allocate_value(self, index: int, number: int, *, is_there: bool) -> None:
        if not self.is_there(index):
            return
        value = self.workload.values[index]
        forward = [] if self.kind.mode == "backward" else [f"F{b}.{number}" for b in value.readers]
        backward = [f"B{b}.{number}" for b in self.readers(index)]
        if value.producer in self.backwards and value.producer in self.schedule.saves:
            backward.append(f"B{value.producer}.{number}")
        needed = [
            *forward,
            *([f"A{self.parked_values[index]}.{number}>"] if index in self.parked_values else backward),
        ]
        is_released = self.kind.outputs == "release" and not value.is_committed
        if value.is_output and is_released:
            needed.append(f"loss {number}")
        elif value.is_output or (value.producer is None and not value.readers and self.kind.mode != "backward"):
            needed.append("end")
        elif not needed:
            if is_there:
                return
            needed = [f"F{value.producer}.{number}"]
        nbytes = 0 if value.on_host else self.workload.storages[value.storage]
        self.allocate(("value", index, number), nbytes, needed, storage=(value.storage, number))
        if not is_there:
            self.ready.discard(("value", index, number))

    def allocate_gradient(self, index: int, number: int) -> None:
        value = self.workload.values[index]
        needed = "end" if value.producer is None else f"B{value.producer}.{number}"
        self.allocate(("gradient", index, number), 0 if value.on_host else value.nbytes, [needed])

    def release(self, name: str) -> None:
        for key in list(self.tensors):
            self.needed[key].pop(name, None)
            if not self.needed[key]:
                del self.tensors[key], self.needed[key]
                self.ready.discard(key)

    def live_bytes(self) -> int:
        return sum(dict(self.tensors.values()).values()) + self.schedule.arena_bytes

    def expect(self, condition: bool, harm: str) -> None:
        if not condition:
            raise Harm(harm)

    def expect_ready(self, kind: str, index: int, op: Op, user: str = "") -> None:
        key = (kind, index, op.micro_batch or 0)
        self.expect(key in self.ready, f"{user or op} finds no {key}")

    def expect_weights(self, position: Position, op: Op) -> None:
        if self.workload.blocks[op.block].state_bytes == 0:
            return
        load = self.bindings.get(position)
        is_there = load is not None and load in self.weights and self.weights[load][2]
        self.expect(is_there, f"{op} at {position} finds no weights")

    # What ops do when they start and when they are done.

    def start(self, position: Position, op: Op) -> None:
        name = op_name(position, op)
        self.expect(op.what == "W" or self.done[name] == 0, f"{name} runs twice")
        number = op.micro_batch or 0
        self.expect(number in self.numbers, f"{name} of no micro-batch")
        if op.what in "FB" and number > 0:
            before = f"{op.what}{op.block}.{number - 1}"
            self.expect(self.done[before] == 1, f"{name} ahead of {before}")
        if not is_there(position, op):
            self.ledger.start(op)
        getattr(self, f"start_{op.what}", lambda *_: None)(position, op)
        self.check_memory(name)

    def check_memory(self, name: str) -> None:
        live = self.live_bytes()
        self.expect(live <= self.schedule.peak_bytes, f"{live} live bytes when {name} starts")
        self.expect(live + self.workspace <= self.schedule.device_bytes, f"too much workspace at {name}")

    def finish(self, position: Position, op: Op) -> None:
        name = op_name(position, op)
        getattr(self, f"finish_{op.what}", lambda *_: None)(position, op)
        self.done[name] += 1
        if not is_there(position, op):
            self.ledger.finish(op)
        # A loss is made of the outputs of a micro-batch until its backward begins, if it has one.
        is_over = op.what == "B" or (
            op.what == "F" and op.block == len(self.workload.blocks) - 1 and not self.backwards
        )
        if is_over:
            self.release(f"loss {op.micro_batch or 0}")
        self.release(name)
        for taking in self.taken_after.get(position, ()):
            self.take(taking)
        self.check_memory(f"the end of {name}")

    def take(self, op: Op) -> None:
        """Takes memory for what an `A` returns; its content isn't there."""
        number = op.micro_batch or 0
        for index in self.parked.get(op.block, ()):
            users = [f"B{b}.{number}" for b in self.readers(index)]
            self.allocate(("returned", index, number), self.workload.values[index].nbytes, users)
            self.ready.discard(("returned", index, number))

    def start_W(self, position: Position, op: Op) -> None:
        assert op.slot is not None
        slot = self.schedule.slots[op.slot]
        nbytes = 0 if self.kind.transfer == "bind" else self.slot_bytes(op.block)
        self.expect(nbytes <= slot.nbytes, f"{op} overflows its slot")
        stop = slot.offset + nbytes
        for block, (low, high) in self.staying.items():
            self.expect(block == op.block or not (low < stop and slot.offset < high), f"{op} overwrites block {block}")
        if op.block in self.schedule.persistent:
            self.expect(self.kind.is_training_step, f"{op} finds nothing from another step")
            self.expect(self.workload.blocks[op.block].frozen_bytes > 0, f"{op} has nothing that stays")
        if op.block in self.staying:
            self.expect(self.done[op_name(position, op)] == 0, f"{op} overwrites what the device has updated")
            self.expect(op.block in self.staying, f"{op} into two places")
            self.expect(self.staying[op.block] == (slot.offset, stop), f"{op} where its weights aren't")
        self.weights = {p: (a, b, c) for p, (a, b, c) in self.weights.items() if not (a < stop and slot.offset < b)}
        self.weights[position] = (slot.offset, stop, False)

    def finish_W(self, position: Position, op: Op) -> None:
        start, stop, _ = self.weights[position]
        self.weights[position] = (start, stop, True)

    def start_F(self, position: Position, op: Op) -> None:
        self.expect(self.kind.mode != "backward", f"{op} again")
        self.expect_weights(position, op)
        number = op.micro_batch or 0
        for index, value in enumerate(self.workload.values):
            if op.block in value.readers:
                self.expect_ready("value", index, op)
            if value.producer == op.block:
                self.allocate_value(index, number, is_there=False)
        if op.block in self.schedule.saves:
            saved = self.workload.blocks[op.block].saved_bytes
            self.allocate(("saved", op.block, number), saved, [f"B{op.block}.{number}"])
        work = self.workload.blocks[op.block]
        kept = work.kept if op.block in self.schedule.results else None
        self.workspace = kept.forward_workspace_bytes if kept is not None else work.forward_workspace_bytes

    def finish_F(self, position: Position, op: Op) -> None:
        self.expect_weights(position, op)
        self.workspace = 0
        made = [i for i, v in enumerate(self.workload.values) if v.producer == op.block]
        self.ready |= {("value", i, op.micro_batch or 0) for i in made}.intersection(self.tensors)

    def start_B(self, position: Position, op: Op) -> None:
        self.expect(op.block in self.backwards, f"{op} has no backward")
        self.expect_weights(position, op)
        if self.kind.mode == "train":
            self.hand_in_gradients(op)
        work = self.workload.blocks[op.block]
        is_saved = op.block in self.schedule.saves
        kept = work.kept if op.block in self.schedule.results else None
        measured = kept.backward_workspace_bytes if kept is not None else work.backward_workspace_bytes
        self.workspace = max(0, measured - (work.saved_bytes if is_saved else 0))
        for index in range(len(self.workload.values)):
            self.start_B_of_value(op, index, is_saved=is_saved)
        if is_saved:
            self.expect_ready("saved", op.block, op)
        if ("parameters", op.block, 0) in self.tensors:
            self.workspace += work.gradient_bytes
        elif work.gradient_bytes > 0:
            is_there = op.block in self.schedule.device_updates
            norms = [f"S{op.block}.0>"] * (self.kind.clip or self.kind.reports_norm)
            users = [f"U{op.block}.0>", *norms] if is_there else [f"G{op.block}.0"]
            self.allocate(("parameters", op.block, 0), work.gradient_bytes, users)

    def hand_in_gradients(self, op: Op) -> None:
        number = op.micro_batch or 0
        if any(self.done[f"B{b}.{number}"] for b in self.backwards):
            return
        forwards = range(len(self.workload.blocks))
        self.expect(all(self.done[f"F{b}.{number}"] for b in forwards), f"{op} before the caller has the outputs")
        for index, value in enumerate(self.workload.values):
            if value.is_output and self.workload.has_value_gradient(index):
                self.allocate_gradient(index, number)
        if self.kind.outputs == "release":  # the loss runs now: the gradients of this op aren't there yet
            needed = self.live_bytes() + self.workload.loss_bytes
            self.expect(needed <= self.schedule.device_bytes, f"too little memory for the loss ahead of {op}")

    def start_B_of_value(self, op: Op, index: int, *, is_saved: bool) -> None:
        value, number = self.workload.values[index], op.micro_batch or 0
        has_gradient = self.workload.has_value_gradient(index)
        if op.block in self.readers(index):
            self.expect_ready(self.kind_in_backward(index), index, op)
            if has_gradient and ("gradient", index, number) in self.tensors:
                self.workspace += 0 if value.on_host else value.nbytes
            elif has_gradient:
                self.allocate_gradient(index, number)
        if value.producer == op.block:
            if is_saved and not value.is_result:
                self.expect_ready("value", index, op)
            complete = len(self.workload.backward_readers(index))
            if has_gradient:
                self.expect(self.given[index, number] == complete, f"{op} with part of a gradient")
                self.expect_ready("gradient", index, op)

    def finish_B(self, position: Position, op: Op) -> None:
        self.expect_weights(position, op)
        self.workspace = 0
        for index in range(len(self.workload.values)):
            if op.block in self.readers(index):
                self.expect_ready(self.kind_in_backward(index), index, op)
                self.given[index, op.micro_batch or 0] += 1

    def kind_in_backward(self, index: int) -> str:
        return "returned" if index in self.parked_values else "value"

    def start_A(self, position: Position, op: Op) -> None:
        self.expect(op.block in self.parked, f"{op} moves nothing")
        number = op.micro_batch or 0
        if position.stream == Stream.D2H:
            self.fill("E", op, number)
        elif ("L", op.block, number) in self.slots:
            self.expect_buffer("L", op, number)
        for index in self.parked.get(op.block, ()):
            if position.stream == Stream.D2H:
                self.expect_ready("value", index, op, f"parking {op}")
            else:
                self.expect((index, number) in self.host, f"{op} returns what isn't on the host")
                if ("returned", index, number) not in self.tensors:
                    self.take(op)

    def finish_A(self, position: Position, op: Op) -> None:
        number = op.micro_batch or 0
        if position.stream == Stream.D2H:
            self.filled("E", op, number)
        elif ("L", op.block, number) in self.slots:
            self.empty("L", op, number)
        for index in self.parked[op.block]:
            if position.stream == Stream.D2H:
                self.expect_ready("value", index, op, f"parked {op}")
                self.host.add((index, number))
            else:
                self.ready.add(("returned", index, number))

    def fill(self, what: str, op: Op, number: int) -> None:
        """A chunk begins to fill the buffer that its op of the disk names, if there is one."""
        slot = self.slots.get((what, op.block, number))
        if slot is not None:
            self.expect(slot not in self.buffers, f"{op} overwrites {self.buffers.get(slot)} in buffer {slot}")
            self.buffers[slot] = op.block, number, False

    def filled(self, what: str, op: Op, number: int) -> None:
        slot = self.slots.get((what, op.block, number))
        if slot is not None:
            self.buffers[slot] = op.block, number, True

    def expect_buffer(self, what: str, op: Op, number: int) -> int:
        slot = self.slots[what, op.block, number]
        assert slot is not None
        self.expect(self.buffers.get(slot) == (op.block, number, True), f"{op} doesn't find its chunk")
        return slot

    def empty(self, what: str, op: Op, number: int) -> None:
        del self.buffers[self.expect_buffer(what, op, number)]

    def start_E(self, position: Position, op: Op) -> None:
        self.expect(self.kind.is_training_step and op.block in self.parked, f"{op} moves nothing")
        self.expect_buffer("E", op, op.micro_batch or 0)

    def finish_E(self, position: Position, op: Op) -> None:
        number = op.micro_batch or 0
        self.empty("E", op, number)
        self.file.add((op.block, number))
        self.host -= {(index, number) for index in self.parked[op.block]}

    def start_L(self, position: Position, op: Op) -> None:
        number = op.micro_batch or 0
        self.expect((op.block, number) in self.file, f"{op} reads what isn't written")
        self.fill("L", op, number)

    def finish_L(self, position: Position, op: Op) -> None:
        number = op.micro_batch or 0
        self.filled("L", op, number)
        self.host |= {(index, number) for index in self.parked[op.block]}

    def start_G(self, position: Position, op: Op) -> None:
        self.expect_ready("parameters", op.block, op)
        for number in self.numbers:
            self.expect(self.done[f"B{op.block}.{number}"] == 1, f"{op} without micro-batch {number}")

    def start_S(self, position: Position, op: Op) -> None:
        if position.stream == Stream.D2H:
            self.expect(op.block in self.ledger.there, f"{op} for nobody")
            self.start_G(position, op)

    def finish_S(self, position: Position, op: Op) -> None:
        if position.stream == Stream.D2H:
            self.expect_ready("parameters", op.block, op)
            self.ledger.squared.add(op.block)

    def start_U(self, position: Position, op: Op) -> None:
        if position.stream != Stream.COMPUTE:
            return
        work = self.workload.blocks[op.block]
        self.expect(op.block in self.schedule.device_updates and work.optimizer_bytes > 0, f"{op} has no state there")
        self.expect_weights(position, op)
        self.expect_ready("parameters", op.block, op)
        self.expect(self.ledger.has_new_norm or not self.kind.clip, f"{op} without the norm")
        for number in self.numbers:
            for what in "FB":
                self.expect(self.done[f"{what}{op.block}.{number}"] == 1, f"{op} before {what} of micro-batch {number}")
        self.workspace = work.update_workspace_bytes

    def finish_U(self, position: Position, op: Op) -> None:
        if position.stream == Stream.COMPUTE:
            self.expect_weights(position, op)
            self.workspace = 0

    def check_end(self) -> None:
        self.expect(not self.buffers, "a buffer still has a chunk")
        forwards = () if self.kind.mode == "backward" else range(len(self.workload.blocks))
        expected = {f"F{b}.{m}" for b in forwards for m in self.numbers}
        expected |= {f"B{b}.{m}" for b in self.backwards for m in self.numbers}
        there = self.schedule.device_updates
        expected |= {f"G{b}.0" for b in self.backwards if self.workload.blocks[b].gradient_bytes > 0 and b not in there}
        expected |= {f"U{b}.0>" for b in there} | {f"S{b}.0>" for b in self.ledger.there}
        self.expect(expected <= {name for name, count in self.done.items() if count}, "something never ran")
        for key, needed in self.needed.items():
            self.expect(set(needed) == {"end"}, f"{key} is never released: {dict(needed)}")
        for block in self.schedule.persistent:
            self.expect(block in self.staying, f"block {block} is nowhere")
        self.ledger.check_end()


def run(machine: Machine, waits: Waits, random: Random, *, is_fixed: bool) -> None:
    """Runs the table once: by fixed priorities of who starts and ends first, or by chance at every moment."""
    queues = {s: [(p, op) for p, op in machine.schedule.positions() if p.stream == s][::-1] for s in streams()}
    running: dict[Stream, tuple[Position, Op]] = {}
    done: set[Position] = set()
    actions = [(verb, stream) for verb in ("start", "finish") for stream in streams()]
    random.shuffle(actions)
    while any(queues.values()) or running:
        if not is_fixed:
            random.shuffle(actions)
        for verb, stream in actions:
            if verb == "finish" and stream in running:
                position, op = running.pop(stream)
                machine.finish(position, op)
                done.add(position)
                break
            if verb == "start" and stream not in running and queues[stream]:
                position, op = queues[stream][-1]
                if done.issuperset(waits.get(position, ())):
                    running[stream] = queues[stream].pop()
                    machine.start(position, op)
                    break
        else:
            raise Harm("deadlock")
    machine.check_end()


def find_harm(
    schedule: Schedule, workload: Workload, *, waits: Waits | None = None, seed: int = 0, runs: int = 12
) -> None:
    """Raises `Harm` if one of some interleavings goes wrong."""
    random = Random(seed)
    waits = schedule.waits() if waits is None else waits
    for attempt in range(runs):
        run(Machine(schedule, workload), waits, random, is_fixed=attempt % 3 != 0)
