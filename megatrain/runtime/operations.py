"""Operations: the handler of each kind of instruction, and the loop that runs instructions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from megatrain.passes.program import Block
from megatrain.runtime.blocks.local_graph import LocalGraph
from megatrain.runtime.call import Call
from megatrain.runtime.call_start import Start
from megatrain.runtime.engine import Engine
from megatrain.runtime.forwards import forward_without_graph
from megatrain.runtime.gradients.landing import KeptLanding, Landing, LandingArena, PlainLanding
from megatrain.runtime.gradients.sink import GradientSink
from megatrain.runtime.gradients.sums import added, marked
from megatrain.runtime.loaded import Loaded
from megatrain.runtime.rank_sums import RankSums, join
from megatrain.runtime.slots import Slots
from megatrain.runtime.streams.stopwatch import Watch
from megatrain.runtime.streams.stream_set import Event
from megatrain.runtime.taken import StepTrainer, Taken, release, without_offload
from megatrain.runtime.turning import showing, turn
from megatrain.scheduler.effects import kind_of
from megatrain.scheduler.instructions import Half, Instruction
from megatrain.scheduler.items import Item, Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.table import Position


class Operations:
    """Runs operations of one schedule on the calls of its micro-batches, one handler per kind: instructions decide.

    Args:
        loaded: The programs, one per micro-batch.
        schedule: What they run.
        engine: Streams, host store and arena.
        arena: Host memory where gradients wait for their updates; None if none wait.

    Attributes:
        slots, sink: The places of state on the device, and where the gradients of parameters go.
    """

    def __init__(self, loaded: Sequence[Loaded], schedule: Schedule, engine: Engine, arena: LandingArena | None = None):
        self.loaded, self.schedule, self.engine = loaded, schedule, engine
        self.instructions = schedule.instructions
        self.segments = engine.segments.of(schedule, [each.program for each in loaded])
        self.slots = Slots(loaded[0].images, engine, loaded[0].program, schedule)
        landing = KeptLanding() if schedule.kind.keeps_totals else self._landing(arena)
        parts = loaded[0].facts.parts
        self.sink = GradientSink(lambda key: engine.tensors[key], engine.device, parts=parts, landing=landing)
        self._rank_sums = RankSums(engine, loaded[0].program, schedule.kind)
        self._alone, self._is_serial = without_offload(self.instructions), schedule.kind.updates == "serial"
        self._offloads = {each.op.block: each.position for each in self.instructions.all if each.op.what == "G"}

    def _landing(self, arena: LandingArena | None) -> Landing | PlainLanding | None:
        """Returns where gradients land; None for calls whose gradients are made on the host, and stay there."""
        loaded, engine, nbytes = self.loaded[0], self.engine, self.instructions.landing_bytes
        if arena is not None:
            return Landing(nbytes, loaded.program, arena, are_totals=self.schedule.kind.has_other_ranks)
        if engine.device.can_bind:
            return None
        return PlainLanding(loaded.program, loaded.facts, engine.gradients, engine.bus, nbytes)

    def start(self, inputs: Sequence[torch.Tensor], number: int = 0) -> Start:
        """Returns a micro-batch's starting state: its inputs, and the present model."""
        places = {} if self.schedule.kind.is_training_step else self.slots.places  # `turn` notes those of a step
        return Start.of(self.loaded[number].program, inputs, self.engine.tensors, places, self.engine.device)

    def run(
        self,
        calls: Sequence[Call],
        half: Half,
        *,
        trainer: StepTrainer | None = None,
        done: set[Position] | None = None,
        is_recovery: bool = False,
        watch: Watch | None = None,
    ) -> None:
        """Hands transfers and work of the host to their streams and runs compute here, in the table's order.

        Args:
            calls: One per micro-batch.
            half: The instructions to run. Ops outside of this half that they wait for are already done.
            trainer: Of a training step; None for a call.
            done: Operations that are over, and are left out; the others are added as they succeed.
            is_recovery: This run completes an earlier one that failed; tests inject no failures.
            watch: Takes the time of each operation.
        """
        done = set() if done is None else done
        left = [instruction for instruction in half.instructions if instruction.position not in done]
        events = {instruction.position: Event(str(instruction.op)) for instruction in left}
        streams, taken = self.engine.streams, Taken(calls, trainer)
        self._take(calls, half.takes)
        # Transfers first: each starts as soon as its waits are over, while compute runs on this thread.
        in_order = sorted(left, key=lambda instruction: instruction.op.stream == "compute")
        # In a training step a G waits on its own thread behind the last weights that somebody reads.
        waits_for = ("h2d",) if trainer is None else ()
        try:
            with streams.step(waits_for=waits_for, is_recovery=is_recovery):
                for instruction in in_order:
                    if trainer is not None and instruction.turns and instruction.micro_batch == 0:
                        trainer.before_backward()
                    waits, over = self._waits(instruction, events), events[instruction.position]
                    work = self._work(taken, instruction)
                    work = work if watch is None else watch.timed(instruction, work)
                    streams.submit(instruction.op.stream, str(instruction.op), work, waits, over)
        finally:
            done.update(position for position, event in events.items() if event.host_done and not event.has_failed)
        release(calls, half.frees)

    def _waits(self, instruction: Instruction, events: Mapping[Position, Event]) -> list[Event]:
        """Events of these operations; others are over. All gradients are those that no G brings, too."""
        waits, op = list(instruction.waits), instruction.op
        if op.what == "N" or (op.what == "U" and self._is_serial):
            waits += self._alone.values()
        elif op.what == "B" and self._alone.get(op.block) == instruction.position:
            # Gradients without elements reach hooks after those of later blocks, as in eager.
            has_own = bool(self.loaded[0].facts.completes[op.block])
            later = [block for block in self._offloads if block > op.block] if has_own else []
            waits += [self._offloads[min(later)]] if later else []
        return [events[wait] for wait in waits if wait in events]

    def _work(self, taken: Taken, instruction: Instruction) -> Callable[[], None]:
        kind = kind_of(instruction.op.stream, instruction.op.what)
        handler = HANDLERS[kind.stream, kind.what]
        calls, trainer = taken

        def work() -> None:
            if trainer is not None and instruction.op.stream == Stream.COMPUTE:
                trainer.before_compute(instruction.micro_batch)
            release(calls, instruction.frees_before)
            if trainer is not None and instruction.turns:
                turn(calls, instruction.micro_batch, trainer, self.engine)
            handler(self, taken, instruction)
            release(calls, instruction.frees_after)
            self._take(calls, instruction.takes)  # without the op's workspace, and what it was the last to use
            self.slots.poison(instruction.leaves)

        return work

    def _take(self, calls: Sequence[Call], items: Sequence[Item]) -> None:
        """Takes device memory for what transfers will bring; on the thread of compute, in the order of its stream."""
        for kind, number, micro_batch in items:
            call = calls[micro_batch]
            if kind == "received":
                call.set_received(number, self._rank_sums.empty(number))
            elif (name := call.loaded.names[number]) is not None:
                call.take(name, self.engine.device)

    def prefetch(self, taken: Taken, instruction: Instruction) -> None:
        """W: copies weights into a slot."""
        self.slots.prefetch(instruction.op.block, instruction.state, persists=instruction.persists)

    def park(self, taken: Taken, instruction: Instruction) -> None:
        """A to the host."""
        call = taken.calls[instruction.micro_batch]
        for value, place in instruction.parked:
            name = call.loaded.names[value]
            if name is not None and not call.lacks(name):
                call.parks.put(name, call.values[name], place.offset)

    def unpark(self, taken: Taken, instruction: Instruction) -> None:
        """A to the device."""
        call = taken.calls[instruction.micro_batch]
        for value, _ in instruction.parked:
            name = call.loaded.names[value]
            if name is not None and not call.lacks(name):
                call.parks.get(name, call.returned[name])

    def forward(self, taken: Taken, instruction: Instruction) -> None:
        """F: with its graph retained, or without."""
        call = taken.calls[instruction.micro_batch]
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
                saved = graph.saved_tensors()
            else:
                saved, outputs = [], forward_without_graph(call, block, instruction, inputs, state)
        for name, tensor in zip(block.outputs, outputs, strict=True):
            call.set_value(name, tensor)
        call.hold("saved", block.index, saved)
        if instruction.micro_batch + 1 < len(taken.calls):
            call.pass_on(block.outputs, taken.calls[instruction.micro_batch + 1])

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

    def backward(self, taken: Taken, instruction: Instruction) -> None:
        """B: from the retained graph, or recomputed. If it fails it has added nothing, so it may run again."""
        call = taken.calls[instruction.micro_batch]
        block = call.loaded.program.blocks[instruction.op.block]
        if block.index not in call.differentiated:
            if instruction.micro_batch == 1:
                join(taken.calls[0], block.index)
            with showing(taken.calls, instruction.micro_batch, block.index, self.engine):
                self._differentiate(taken, call, block, instruction)
            call.differentiated.add(block.index)
        if block.index in self._alone and instruction.micro_batch == len(taken.calls) - 1:
            self.offload(taken, instruction)  # there is nothing to move, so there is no G

    def _differentiate(self, taken: Taken, call: Call, block: Block, instruction: Instruction) -> None:
        call.state_of[block.index] = instruction.state
        output_gradients = [call.gradients.get(name) for name in block.outputs]
        carried = [call.gradients.get(name) for name in block.inputs]
        if all(g is None for g in output_gradients):
            self._added(taken, block, [None] * len(block.binding))()
            return
        graph = call.graphs.get(block.index) or self._recomputed(call, block, instruction)
        try:
            own, parameters = graph.gradients(output_gradients, carried)
            add = self._added(taken, block, parameters)
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

    def _added(self, taken: Taken, block: Block, gradients: Sequence[torch.Tensor | None]) -> Callable[[], None]:
        """Adds one micro-batch's gradients of a block's parameters to those before.

        Returns:
            The rest of the work, which takes no memory: until it runs, the sums are as they were.
        """
        first, index = taken.calls[0], block.index
        # Memory that others hold too must not become a `.grad`; looked up before this call holds the gradient as well.
        sums, add_in_place = added(first.parameter_gradients.get(index), marked(gradients, self.engine.meter.has))

        def add() -> None:
            add_in_place()
            first.set_sums(index, sums)

        return add

    def offload(self, taken: Taken, instruction: Instruction) -> None:
        """G: of the total of all ranks, where there are several."""
        first, block = taken.calls[0], taken.calls[0].loaded.program.blocks[instruction.op.block]
        completes = first.loaded.facts.completes[block.index]
        if instruction.op.what == "G" and self.schedule.kind.has_other_ranks:
            found = self._rank_sums.totals(first, block.index)
        else:
            found = nullcontext(first.parameter_gradients[block.index])
        with found as gradients:
            self.sink.receive(block.index, block.binding, gradients, completes, instruction.landing)

    def receive(self, taken: Taken, instruction: Instruction) -> None:
        """R: the sum of the ranks before, to which this rank adds."""
        self._rank_sums.receive(taken.calls[0], instruction.op.block)

    def pass_on(self, taken: Taken, instruction: Instruction) -> None:
        """P."""
        self._rank_sums.pass_on(taken.calls[0], instruction.op.block)

    def squares(self, taken: Taken, instruction: Instruction) -> None:
        """S."""
        taken.step_trainer.squares(taken.calls[0].loaded.facts.completes[instruction.op.block])

    def norm(self, taken: Taken, instruction: Instruction) -> None:
        """N."""
        taken.step_trainer.norm()

    def update(self, taken: Taken, instruction: Instruction) -> None:
        """U."""
        taken.step_trainer.update(instruction.op.block)

    def wait(self, taken: Taken, instruction: Instruction) -> None:
        """V: until other ranks have updated the block."""
        taken.step_trainer.wait(instruction.op.block, self._rank_sums.go_on)


Handler = Callable[[Operations, Taken, Instruction], None]

HANDLERS: dict[tuple[str, str], Handler] = {
    (Stream.H2D, "W"): Operations.prefetch,
    (Stream.H2D, "A"): Operations.unpark,
    (Stream.COMPUTE, "F"): Operations.forward,
    (Stream.COMPUTE, "B"): Operations.backward,
    (Stream.D2H, "A"): Operations.park,
    (Stream.D2H, "G"): Operations.offload,
    (Stream.HOST, "S"): Operations.squares,
    (Stream.HOST, "N"): Operations.norm,
    (Stream.HOST, "U"): Operations.update,
    (Stream.RECEIVE, "R"): Operations.receive,
    (Stream.SEND, "P"): Operations.pass_on,
    (Stream.PEERS, "V"): Operations.wait,
}
"""What does each kind of op, by stream and letter; `megatrain.extending.register_op` adds more."""
