"""Operations: the handler of each kind of instruction; and Run, the instructions under way on calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from operator import is_
from typing import Any, NamedTuple

import torch

from megatrain.device import Device
from megatrain.device.bus import GrowingArena
from megatrain.files.scratch_file import ScratchFile
from megatrain.passes.program import Block
from megatrain.runtime.accumulation import added, marked
from megatrain.runtime.block import LocalGraph
from megatrain.runtime.call import DONE, FAILED, Call, StepTrainer, forward_without_graph, showing, turn
from megatrain.runtime.engine import Engine
from megatrain.runtime.gradients import CallPlaces, GradientBuffer, StepPlaces
from megatrain.runtime.loaded import Loaded
from megatrain.runtime.random_calls import MicroBatchGenerators
from megatrain.runtime.stores.device_memory import segment_sizes
from megatrain.runtime.stores.slots import Slots
from megatrain.runtime.streams.events import Watch
from megatrain.runtime.streams.stream_set import Event
from megatrain.runtime.versions import Start
from megatrain.scheduler.effects import kind_of
from megatrain.scheduler.instructions import Bytes, Half, Instruction, Instructions
from megatrain.scheduler.items import Item, Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.table import Position


class Operations:
    """Does operations of one schedule on the calls of its micro-batches, one handler per kind: instructions decide.

    Args:
        loaded: The programs, one per micro-batch.
        arena: Host memory where gradients wait for their updates; None if none wait.
    """

    def __init__(
        self,
        loaded: Sequence[Loaded],
        schedule: Schedule,
        engine: Engine,
        instructions: Instructions,
        arena: GrowingArena | None = None,
    ):
        self.loaded, self.schedule, self.engine = loaded, schedule, engine
        self.instructions, self.arena = instructions, arena
        self.runners = [runner for each in loaded for runner in each.runners]
        assert engine.store is not None
        self.slots = Slots(loaded[0].images, engine.store, engine.arena, loaded[0].program, schedule)
        all_ = self.instructions.all
        self._offloads = {each.op.block: each.position for each in all_ if each.op.what == "G"}
        self._there = frozenset(schedule.device_updates)
        others = self._there.union(self._offloads)  # the last B of each other block leaves gradients where they are
        self._alone = {o.op.block: o.position for o in all_ if o.op.what == "B" and o.op.block not in others}
        self._lowered: list[tuple[Half, _Lowered]] = []

    @cached_property
    def gradients(self) -> GradientBuffer:
        """Collects the gradients of backwards; made for the first one, which many schedules never have."""
        first, engine, nbytes = self.loaded[0], self.engine, self.instructions.landing_bytes
        parts, places = first.facts.parts, None  # gradients that are made on the host stay there
        if self.arena is not None:
            places = StepPlaces(nbytes, first.program, self.arena)
        elif not engine.device.can_bind:
            places = CallPlaces(first.program, first.facts.trained, parts, engine.gradients, nbytes)
        return GradientBuffer(lambda key: engine.tensors[key], engine.bus, parts=parts, places=places)

    @cached_property
    def segment_sizes(self) -> list[int]:
        """Bytes of the segments of device memory that a run needs; looked up when they are first needed."""
        return segment_sizes(self.schedule, [each.program for each in self.loaded])

    def start(self, inputs: Sequence[torch.Tensor], number: int = 0) -> Start:
        """Returns a micro-batch's starting state: its inputs, and the present model."""
        places = {} if self.schedule.kind.is_training_step else self.slots.places  # `turn` notes those of a step
        return Start.of(self.loaded[number].program, inputs, self.engine.tensors, places, self.engine.device)

    def begin(
        self,
        starts: Sequence[Start],
        *,
        can_repeat: bool = False,
        watch: Watch | None = None,
        file: ScratchFile | None = None,
    ) -> Run:
        """Makes the calls of a run.

        Args:
            starts: The starting state of each micro-batch; a call has one.
            can_repeat: A backward may be attempted again.
            watch: Takes the time of each operation.
            file: Has parked values, if the schedule moves some on to a file.
        """
        engine, made = self.engine, self.instructions
        buffers = engine.offload.take(made.park_bytes, len(starts), made.buffer_bytes, file)
        draws, are_random = [each.draws for each in self.loaded], [start.rng is not None for start in starts]
        generators = MicroBatchGenerators.of(draws, are_random, engine.device)
        given = zip(self.loaded, starts, buffers, generators, strict=True)
        state = partial(self.slots.samples, self.loaded[0].facts.read_backward)
        calls = [
            Call(engine.meter, buffer, start, loaded, state, generators=own, can_repeat=can_repeat)
            for loaded, start, buffer, own in given
        ]
        return Run(self, calls, watch=watch)

    def lowered(self, half: Half) -> _Lowered:
        """Everything about the instructions of a half that is the same in each run, looked up once."""
        known = next((found for each, found in self._lowered if each is half), None)
        if known is None:
            # Transfers first: each starts as soon as its waits are over, while compute runs on the caller's thread.
            in_order = sorted(half.instructions, key=lambda instruction: instruction.op.stream == Stream.COMPUTE)
            numbers = {instruction.position: number for number, instruction in enumerate(in_order)}
            steps = [self._step(instruction, numbers) for instruction in in_order]
            known = _Lowered(steps, self._named(half.frees), self._named(half.takes))
            self._lowered.append((half, known))
        return known

    def _step(self, instruction: Instruction, numbers: Mapping[Position, int]) -> _Step:
        op = instruction.op
        return _Step(
            instruction,
            str(op),
            HANDLERS[(kind := kind_of(op.stream, op.what)).stream, kind.what],
            [numbers[wait] for wait in self.waits(instruction) if wait in numbers],
            self._named(instruction.frees_before),
            self._named(instruction.frees_after),
            self._named(instruction.takes),
        )

    def _named(self, items: Sequence[Item]) -> list[_Named]:
        """Items by their names; values of other micro-batches have none."""
        found = [
            (micro_batch, kind, self.loaded[micro_batch].names[number] if kind in _OF_VALUES else number)
            for kind, number, micro_batch in items
        ]
        return [(micro_batch, kind, name) for micro_batch, kind, name in found if name is not None]

    def waits(self, instruction: Instruction) -> Sequence[Position]:
        """What an instruction waits for. All gradients are those that no G brings, too."""
        waits, op = list(instruction.waits), instruction.op
        if op.what == "N" or (op.what == "U" and self.schedule.kind.updates == "serial"):
            waits += self._alone.values()
        elif op.what == "B" and self._alone.get(op.block) == instruction.position:
            # Gradients without elements reach hooks after those of later blocks, as in eager.
            has_own = bool(self.loaded[0].facts.completes[op.block])
            later = [block for block in self._offloads if block > op.block] if has_own else []
            waits += [self._offloads[min(later)]] if later else []
        return waits

    def poison(self, ranges: Sequence[Bytes]) -> None:
        """Fills released bytes with NaN, if a test asked for it."""
        chaos = self.engine.chaos
        if chaos is not None and chaos.poison:
            for where in ranges:
                self.engine.arena.slot(*where).fill_(0xFF)

    def prefetch(self, run: Run, instruction: Instruction) -> None:
        """W: copies weights into a slot, or has them there with the optimizer's state."""
        if instruction.op.block in self._there and instruction.state is not None:
            return self.slots.bring(instruction.op.block, instruction.state, run.step_trainer.bring)
        self.slots.prefetch(instruction.op.block, instruction.state, persists=instruction.persists)

    def park(self, run: Run, instruction: Instruction) -> None:
        """A: to the host, or back to the device."""
        call, is_back = run.calls[instruction.micro_batch], instruction.op.stream == Stream.H2D
        move, tensors = (call.offload.get, call.returned) if is_back else (call.offload.put, call.values)
        for value, place in instruction.parked:
            name = call.loaded.names[value]
            if name is not None and not call.lacks(name):
                move(name, tensors[name], place, instruction.buffer)

    def forward(self, run: Run, instruction: Instruction) -> None:
        """F: with its graph retained, or without."""
        call = run.calls[instruction.micro_batch]
        block = call.loaded.program.blocks[instruction.op.block]
        runner = call.loaded.runners[block.index]
        inputs = [call.values[name] for name in block.inputs]
        state = self.slots.state(block.index, instruction.state)
        with call.generators.drawing(block.index):
            if instruction.recomputes or call.can_repeat:
                call.rng[block.index] = runner.rng_state()
            if instruction.retains:
                graph, outputs = self._graph(call, block, instruction, inputs, state)
                call.graphs[block.index] = graph
                call.hold("saved", block.index, graph.saved_tensors())
            else:
                outputs = forward_without_graph(call, block, inputs, state, keeps=instruction.keeps)
        for name, tensor in zip(block.outputs, outputs, strict=True):
            call.set_value(name, tensor)
        if instruction.micro_batch + 1 < len(run.calls):
            call.pass_on(block.outputs, run.calls[instruction.micro_batch + 1])

    def _graph(
        self, call: Call, block: Block, instruction: Instruction, inputs: Any, state: Any, **repeated: Any
    ) -> tuple[Any, Sequence[torch.Tensor]]:
        # The graph keeps this function; it must not keep the call, which keeps the graph.
        states = call.state_of
        states[block.index] = instruction.state
        return call.loaded.runners[block.index].forward_with_graph(
            inputs,
            state,
            call.loaded.facts.needs_grad[block.index],
            call.loaded.facts.is_carried[block.index],
            lambda: self.slots.state(block.index, states[block.index]),
            **repeated,
        )

    def backward(self, run: Run, instruction: Instruction) -> None:
        """B: from the retained graph, or recomputed. If it fails it has added nothing, so it may run again."""
        call = run.calls[instruction.micro_batch]
        block = call.loaded.program.blocks[instruction.op.block]
        if block.index not in call.differentiated:
            with showing(run.calls, instruction.micro_batch, block.index, self.engine):
                self._differentiate(run, call, block, instruction)
            call.differentiated.add(block.index)
        if block.index in self._alone and instruction.micro_batch == len(run.calls) - 1:
            self.offload(run, instruction)  # there is nothing to move, so there is no G

    def _differentiate(self, run: Run, call: Call, block: Block, instruction: Instruction) -> None:
        call.state_of[block.index] = instruction.state
        output_gradients = [call.gradients.get(name) for name in block.outputs]
        carried = [call.gradients.get(name) for name in block.inputs]
        if not any([g is not None for g in output_gradients]):
            self._added(run, block, [None] * len(block.binding))()
            return
        graph = call.graphs.get(block.index) or self._recomputed(call, block, instruction)
        try:
            own, parameters = graph.gradients(output_gradients, carried)
            add = self._added(run, block, parameters)
        except BaseException:
            call.drop("saved", block.index)  # half of it is gone; a second attempt, if there is one, recomputes
            raise
        for name, gradient in zip(block.inputs, own, strict=True):
            if gradient is not None:
                call.drop("gradient", name)  # the sum so far is part of the new one
                call.set_gradient(name, gradient)
        add()

    def _recomputed(self, call: Call, block: Block, instruction: Instruction) -> LocalGraph:
        inputs = call.backward_inputs(block.inputs)
        with call.loaded.runners[block.index].repeated(call.rng.get(block.index)):
            state = self.slots.state(block.index, instruction.state)
            found = call.results(block.index)
            return self._graph(call, block, instruction, inputs, state, is_repeated=True, kept=found)[0]

    def _added(self, run: Run, block: Block, gradients: Sequence[torch.Tensor | None]) -> Callable[[], None]:
        """Adds one micro-batch's gradients of a block's parameters to those before.

        Returns:
            The rest of the work, which takes no memory: until it runs, the sums are as they were.
        """
        first, index = run.calls[0], block.index
        # Memory that others hold must not become a `.grad`; looked up before this call holds it.
        (found, storages), known = marked(gradients, self.engine.meter), first.parameter_gradients.get(index)
        sums, add_in_place = added(known, found)

        def add() -> None:
            add_in_place()
            if not known or not all(map(is_, sums, known)):  # else all of it was added in place
                first.set_sums(index, sums, None if known else storages)

        return add

    def offload(self, run: Run, instruction: Instruction) -> None:
        """G, or the S of gradients that stay on the device."""
        first, block = run.calls[0], run.calls[0].loaded.program.blocks[instruction.op.block]
        gradients, completes = first.parameter_gradients[block.index], first.loaded.facts.completes[block.index]
        if block.index in self._there:
            return self.gradients.take_norms(block.binding, gradients, completes, run.step_trainer.norm_there)
        self.gradients.receive(block.index, block.binding, gradients, completes, instruction.landing)

    def squares(self, run: Run, instruction: Instruction) -> None:
        """S of the host."""
        run.step_trainer.squares(run.calls[0].loaded.facts.completes[instruction.op.block])

    def update_there(self, run: Run, instruction: Instruction) -> None:
        """U of the device."""
        found = [gradient for gradient, _ in run.calls[0].parameter_gradients[instruction.op.block]]
        run.step_trainer.update_there(instruction.op.block, self.loaded[0].images[instruction.op.block], found)


class Run:
    """One run of a schedule. After a failure a training step can continue, or be dropped.

    Only the trainer's work outlives a run, and buffers: each micro-batch's are written when its backward begins, as its
    loss may look at them, at the latest by `commit`.

    Args:
        operations: Runs the instructions.
        calls: One per micro-batch; an attribute.
        watch: Takes the time of each operation.
    """

    def __init__(self, operations: Operations, calls: Sequence[Call], *, watch: Watch | None = None):
        self.calls = calls
        self._trainer: StepTrainer | None = None
        self._operations = operations
        self._watch = watch
        if watch is not None:
            watch.restart()  # an attempt that failed may have left times
        self._done: set[int] = set()

    @property
    def device(self) -> Device:
        """The compute device."""
        return self._operations.engine.device

    @property
    def step_trainer(self) -> StepTrainer:
        """The trainer, which a training step has."""
        assert self._trainer is not None
        return self._trainer

    def forward(self) -> None:
        """Runs a call until it has its outputs.

        Raises:
            ExecuteError: If an operation on a stream's own thread fails. What compute raises passes unchanged.
        """
        self._begin()
        self._go(self._operations.instructions.forward)

    def go(self, trainer: StepTrainer) -> None:
        """Runs a training step.

        Raises:
            ExecuteError: See `forward`.
        """
        self._begin()
        operations, kind = self._operations, self._operations.schedule.kind
        # On the CPU the norm is torch's on the CPU; and that of several processes is of their sums.
        is_normed = (kind.clip or kind.reports_norm) and not self.device.is_host and trainer.exchange.is_alone
        hear = trainer.hear_norm if is_normed else None
        operations.gradients.begin(trainer.receive, land=trainer.exchange.land, hear=hear)
        self._trainer = trainer
        self._go(operations.instructions.backward)

    def complete(self, trainer: StepTrainer) -> None:
        """Runs the rest of a training step after a failure, but what the trainer does: updates, and their moments.

        Raises:
            ExecuteError: See `forward`.
        """
        half = self._operations.instructions.backward
        ops = enumerate(step.instruction.op for step in self._operations.lowered(half).steps)
        self._done.update(number for number, op in ops if op.stream == Stream.HOST or op.what in ("R", "K"))
        self._operations.gradients.stop_reuse()
        self._trainer = trainer
        self._go(half, is_recovery=True)

    def backward(self, instructions: Instructions) -> None:
        """Runs the backward half of a call.

        Args:
            instructions: Those of the schedule, or others that prefetch anew what the forward left in slots.
        """
        self._go(instructions.backward)

    def _begin(self) -> None:
        """Makes everything that the forward starts from ready."""
        operations, engine = self._operations, self._operations.engine
        engine.give_slots(None)  # another size loses what they hold, also if it fails
        scheduled = operations.schedule.device_bytes
        engine.reserve_slots(operations.instructions.slot_bytes, scheduled, operations.runners)
        if engine.is_tight(scheduled):
            engine.segments.make(operations.segment_sizes)
        for number, call in enumerate(self.calls):
            call.begin(engine.buffers if number == 0 else None)
        for call, later in pairwise(self.calls):
            call.pass_on(call.loaded.program.inputs, later)

    def _go(self, half: Half, *, is_recovery: bool = False) -> None:
        """Hands transfers and work of the host to their streams and runs compute here, in the table's order.

        Args:
            half: The instructions to run, but those that are done. Ops outside of it that they wait for are over.
            is_recovery: This completes an earlier attempt that failed; tests inject no failures.
        """
        operations, trainer, done = self._operations, self._trainer, self._done
        steps, frees, takes = operations.lowered(half)
        events = [None if number in done else Event(step.label) for number, step in enumerate(steps)]
        streams = operations.engine.streams
        self._take(takes)
        # In a training step a G waits on its own thread for the last weights that somebody reads.
        waits_for = ("h2d",) if trainer is None else ()
        try:
            with streams.step(waits_for=waits_for, is_recovery=is_recovery):
                for step, over in zip(steps, events, strict=True):
                    if over is None:
                        continue
                    instruction = step.instruction
                    if trainer is not None and instruction.turns and instruction.micro_batch == 0:
                        trainer.before_backward()
                    waits = [event for wait in step.waits if (event := events[wait]) is not None]
                    work = partial(self._do, step)
                    work = work if self._watch is None else self._watch.timed(instruction, work)
                    streams.submit(instruction.op.stream, step.label, work, waits, over)
        finally:
            found = enumerate(events)
            done.update(n for n, each in found if each is not None and each.host_done and not each.has_failed)
        self._release(frees)

    def _do(self, step: _Step) -> None:
        """Does the work of an instruction, on the thread of its stream."""
        instruction, trainer, operations = step.instruction, self._trainer, self._operations
        if trainer is not None and instruction.op.stream == Stream.COMPUTE:
            trainer.before_compute(instruction.micro_batch)
        self._release(step.frees_before)
        if trainer is not None and instruction.turns:
            turn(self.calls, instruction.micro_batch, trainer, operations.engine)
        step.handler(operations, self, instruction)
        self._release(step.frees_after)
        self._take(step.takes)  # without the op's workspace, and what it was the last to use
        operations.poison(instruction.leaves)

    def _take(self, items: Sequence[_Named]) -> None:
        """Takes device memory for what transfers will bring; on the thread of compute, in the order of its stream."""
        for micro_batch, _, name in items:
            self.calls[micro_batch].take(str(name), self.device)

    def _release(self, items: Sequence[_Named]) -> None:
        """Lets go of items."""
        for micro_batch, kind, name in items:
            self.calls[micro_batch].drop(kind, name)

    def write_buffers(self) -> None:
        """Writes the buffers as the last micro-batch left them, unless its backward has begun and they are written."""
        self.calls[-1].write_buffers(self._operations.engine)

    def leave_generators(self) -> None:
        """Sets the global generators to the end of the last forward, from which code after a training step draws."""
        self.calls[-1].generators.leave()

    def commit(self) -> None:
        """Writes the buffers, and ends a training step."""
        self.write_buffers()
        self.close(DONE)

    def close(self, status: str = FAILED) -> None:
        """Ends the run and releases everything that it held; one that failed leaves buffers as they were before it."""
        self._operations.gradients.end()
        for call in self.calls:
            if status == FAILED:
                call.restore_buffers()
            call.close(status)


_OF_VALUES = ("value", "gradient", "original", "returned")
_Named = tuple[int, str, str | int]
"""The micro-batch, kind and name of an item."""


class _Step(NamedTuple):
    """An instruction with what a run would look up of it; `waits` are the numbers of the steps that must be over."""

    instruction: Instruction
    label: str
    handler: Handler
    waits: Sequence[int]
    frees_before: Sequence[_Named]
    frees_after: Sequence[_Named]
    takes: Sequence[_Named]


class _Lowered(NamedTuple):
    """The steps of a half in the order in which they are handed to streams, and what it frees and takes itself."""

    steps: Sequence[_Step]
    frees: Sequence[_Named]
    takes: Sequence[_Named]


Handler = Callable[[Operations, Run, Instruction], None]

HANDLERS: dict[tuple[str, str], Handler] = {
    (Stream.H2D, "W"): Operations.prefetch,
    (Stream.H2D, "A"): Operations.park,
    (Stream.COMPUTE, "F"): Operations.forward,
    (Stream.COMPUTE, "B"): Operations.backward,
    (Stream.COMPUTE, "U"): Operations.update_there,
    (Stream.D2H, "A"): Operations.park,
    (Stream.D2H, "G"): Operations.offload,
    (Stream.D2H, "S"): Operations.offload,
    (Stream.HOST, "S"): Operations.squares,
    (Stream.HOST, "N"): lambda _, run, __: run.step_trainer.norm(),
    (Stream.HOST, "U"): lambda _, run, instruction: run.step_trainer.update(instruction.op.block),
    (Stream.DISK, "E"): lambda _, run, instruction: run.calls[instruction.micro_batch].offload.evict(instruction),
    (Stream.DISK, "L"): lambda _, run, instruction: run.calls[instruction.micro_batch].offload.reload(instruction),
    (Stream.DISK, "R"): lambda _, run, instruction: run.step_trainer.read_moments(instruction.op.block),
    (Stream.DISK, "K"): lambda _, run, instruction: run.step_trainer.write_moments(instruction.op.block),
}
"""What does each kind of op, by stream and letter; `megatrain.extending.register_op` adds more."""
