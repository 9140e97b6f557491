"""An oracle: runs a table on symbols, in any order that the streams and the waits allow, and looks for harm.

It knows nothing of ticks beyond the order of each stream, and keeps its own books of what is where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from megatrain.scheduler.op import STREAMS, Op, Stream
from megatrain.scheduler.table import Position, Schedule
from megatrain.scheduler.workload import Workload

Waits = Mapping[Position, Sequence[Position]]


class Harm(AssertionError):
    """Something a real step would have got wrong."""


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
    tensors: dict[tuple[str, int], tuple[object, int]] = field(default_factory=dict)
    ready: set[tuple[str, int]] = field(default_factory=set)
    needed: dict[tuple[str, int], Counter[str]] = field(default_factory=dict)
    host: set[int] = field(default_factory=set)
    given: Counter[int] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    workspace: int = 0

    def __post_init__(self) -> None:
        self.bindings = self.schedule.bindings()
        self.parked = self.schedule.parked()
        self.backwards = set() if self.schedule.mode == "forward" else set(self.workload.backward_blocks())
        self.parked_values = {v: k for k, values in self.parked.items() for v in values}
        is_backward = self.schedule.mode == "backward"
        for index, value in enumerate(self.workload.values):
            if is_backward and index in self.parked_values:
                self.host.add(index)
            elif value.producer is None or is_backward:
                self.allocate_value(index, is_there=True)
            if is_backward and value.is_output and self.workload.has_value_gradient(index):
                self.allocate_gradient(index)
        if is_backward:
            for block in self.schedule.saves:
                self.allocate(("saved", block), self.workload.blocks[block].saved_bytes, [f"B{block}"])

    # What lives on the device.

    def allocate(self, key: tuple[str, int], nbytes: int, needed: Sequence[str], *, storage: object = None) -> None:
        if key in self.tensors:
            raise Harm(f"{key} is made twice")
        self.tensors[key] = (key if storage is None else ("storage", storage), nbytes)
        self.needed[key] = Counter(needed)
        self.ready.add(key)

    def allocate_value(self, index: int, *, is_there: bool) -> None:
        value = self.workload.values[index]
        forward = [] if self.schedule.mode == "backward" else [f"F{b}" for b in value.readers]
        backward = [f"B{b}" for b in value.readers if b in self.backwards]
        if value.producer in self.backwards and value.producer in self.schedule.saves:
            backward.append(f"B{value.producer}")
        needed = [
            *forward,
            *([f"A{self.parked_values[index]}>"] if index in self.parked_values else backward),
        ]
        if value.is_output or (value.producer is None and not value.readers and not is_later(self.schedule)):
            needed.append("end")
        elif not needed:
            if is_there:
                return
            needed = [f"F{value.producer}"]
        nbytes = self.workload.storages[value.storage]
        self.allocate(("value", index), nbytes, needed, storage=value.storage)
        if not is_there:
            self.ready.discard(("value", index))

    def allocate_gradient(self, index: int) -> None:
        value = self.workload.values[index]
        needed = "end" if value.producer is None else f"B{value.producer}"
        self.allocate(("gradient", index), value.nbytes, [needed])

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

    def expect_ready(self, kind: str, index: int, user: str) -> None:
        self.expect((kind, index) in self.ready, f"{user} finds no {kind} {index}")

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
        getattr(self, f"start_{op.what}")(position, op)
        self.check_memory(name)

    def check_memory(self, name: str) -> None:
        live = self.live_bytes()
        self.expect(live <= self.schedule.peak_bytes, f"{live} live bytes when {name} starts")
        self.expect(live + self.workspace <= self.schedule.device_bytes, f"too much workspace at {name}")

    def finish(self, position: Position, op: Op) -> None:
        name = op_name(position, op)
        getattr(self, f"finish_{op.what}", lambda *_: None)(position, op)
        self.done[name] += 1
        self.release(name)

    def start_W(self, position: Position, op: Op) -> None:
        assert op.slot is not None
        slot = self.schedule.slots[op.slot]
        nbytes = 0 if self.schedule.transfer == "bind" else self.workload.blocks[op.block].state_bytes
        self.expect(nbytes <= slot.nbytes, f"{op} overflows its slot")
        stop = slot.offset + nbytes
        self.weights = {p: (a, b, c) for p, (a, b, c) in self.weights.items() if not (a < stop and slot.offset < b)}
        self.weights[position] = (slot.offset, stop, False)

    def finish_W(self, position: Position, op: Op) -> None:
        start, stop, _ = self.weights[position]
        self.weights[position] = (start, stop, True)

    def start_F(self, position: Position, op: Op) -> None:
        self.expect(self.schedule.mode != "backward", f"{op} again")
        self.expect_weights(position, op)
        for index, value in enumerate(self.workload.values):
            if op.block in value.readers:
                self.expect_ready("value", index, str(op))
            if value.producer == op.block:
                self.allocate_value(index, is_there=False)
        if op.block in self.schedule.saves:
            saved = self.workload.blocks[op.block].saved_bytes
            self.allocate(("saved", op.block), saved, [f"B{op.block}"])
        self.workspace = self.workload.blocks[op.block].forward_workspace_bytes

    def finish_F(self, position: Position, op: Op) -> None:
        self.expect_weights(position, op)
        self.workspace = 0
        self.ready |= {("value", i) for i, v in enumerate(self.workload.values) if v.producer == op.block}.intersection(
            self.tensors
        )

    def start_B(self, position: Position, op: Op) -> None:
        self.expect(op.block in self.backwards, f"{op} has no backward")
        self.expect_weights(position, op)
        if self.schedule.mode == "train":
            self.hand_in_gradients(op)
        work = self.workload.blocks[op.block]
        is_saved = op.block in self.schedule.saves
        self.workspace = max(0, work.backward_workspace_bytes - (work.saved_bytes if is_saved else 0))
        for index in range(len(self.workload.values)):
            self.start_B_of_value(op, index, is_saved=is_saved)
        if is_saved:
            self.expect_ready("saved", op.block, str(op))
        if work.gradient_bytes > 0:
            self.allocate(("parameters", op.block), work.gradient_bytes, [f"G{op.block}"])

    def hand_in_gradients(self, op: Op) -> None:
        if any(self.done[f"B{b}"] for b in self.backwards):
            return
        forwards = range(len(self.workload.blocks))
        self.expect(all(self.done[f"F{b}"] for b in forwards), f"{op} before the caller has the outputs")
        for index, value in enumerate(self.workload.values):
            if value.is_output and self.workload.has_value_gradient(index):
                self.allocate_gradient(index)

    def start_B_of_value(self, op: Op, index: int, *, is_saved: bool) -> None:
        value = self.workload.values[index]
        has_gradient = self.workload.has_value_gradient(index)
        if op.block in value.readers:
            self.expect_ready(self.kind_in_backward(index), index, str(op))
            if has_gradient and ("gradient", index) in self.tensors:
                self.workspace += value.nbytes
            elif has_gradient:
                self.allocate_gradient(index)
        if value.producer == op.block:
            if is_saved:
                self.expect_ready("value", index, str(op))
            complete = len(self.workload.backward_readers(index))
            if has_gradient:
                self.expect(self.given[index] == complete, f"{op} with part of a gradient")
                self.expect_ready("gradient", index, str(op))

    def finish_B(self, position: Position, op: Op) -> None:
        self.expect_weights(position, op)
        self.workspace = 0
        for index, value in enumerate(self.workload.values):
            if op.block in value.readers:
                self.expect_ready(self.kind_in_backward(index), index, str(op))
                self.given[index] += 1

    def kind_in_backward(self, index: int) -> str:
        return "returned" if index in self.parked_values else "value"

    def start_A(self, position: Position, op: Op) -> None:
        self.expect(op.block in self.parked, f"{op} moves nothing")
        for index in self.parked.get(op.block, ()):
            value = self.workload.values[index]
            if position.stream == Stream.D2H:
                self.expect_ready("value", index, f"parking {op}")
            else:
                self.expect(index in self.host, f"{op} returns what isn't on the host")
                users = [f"B{b}" for b in value.readers if b in self.backwards]
                self.allocate(("returned", index), value.nbytes, users)
                self.ready.discard(("returned", index))

    def finish_A(self, position: Position, op: Op) -> None:
        for index in self.parked[op.block]:
            if position.stream == Stream.D2H:
                self.expect_ready("value", index, f"parked {op}")
                self.host.add(index)
            else:
                self.ready.add(("returned", index))

    def start_G(self, position: Position, op: Op) -> None:
        self.expect_ready("parameters", op.block, str(op))

    def check_end(self) -> None:
        forwards = () if self.schedule.mode == "backward" else range(len(self.workload.blocks))
        expected = {f"F{b}" for b in forwards} | {f"B{b}" for b in self.backwards}
        expected |= {f"G{b}" for b in self.backwards if self.workload.blocks[b].gradient_bytes > 0}
        self.expect(expected <= {name for name, count in self.done.items() if count}, "something never ran")
        for key, needed in self.needed.items():
            self.expect(set(needed) == {"end"}, f"{key} is never released: {dict(needed)}")


def is_later(schedule: Schedule) -> bool:
    return schedule.mode == "backward"


def op_name(position: Position, op: Op) -> str:
    leaves = ">" if op.what == "A" and position.stream == Stream.D2H else ""
    return f"{op.what}{op.block}{leaves}"


def run(schedule: Schedule, workload: Workload, waits: Waits, random: Random, *, is_fixed: bool) -> None:
    """Runs the table once: by fixed priorities of who starts and ends first, or by chance at every moment."""
    machine = Machine(schedule, workload)
    queues = {s: [(p, op) for p, op in schedule.positions() if p.stream == s][::-1] for s in STREAMS}
    running: dict[Stream, tuple[Position, Op]] = {}
    done: set[Position] = set()
    actions = [(verb, stream) for verb in ("start", "finish") for stream in STREAMS]
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
        run(schedule, workload, waits, random, is_fixed=attempt % 3 != 0)
