"""Operations: the handler of each kind of instruction, and the loop that runs instructions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatrain.errors import DeviceMemoryWarning, ExecuteError
from megatrain.passes.program import Block, Program
from megatrain.runtime.block import LocalGraph, Tensors
from megatrain.runtime.call import Call
from megatrain.runtime.call_start import Start, sampled
from megatrain.runtime.engine import Engine
from megatrain.runtime.gradients.landing import Landing, LandingArena, PlainLanding
from megatrain.runtime.gradients.sink import GradientSink, added, marked
from megatrain.runtime.loaded import Loaded
from megatrain.runtime.stores.host_store import BlockImage, HostStore
from megatrain.runtime.stores.parks import Persisting
from megatrain.runtime.streams.events import Watch
from megatrain.runtime.streams.stream_set import Event
from megatrain.runtime.taken import StepTrainer, Taken, release, showing, turn, without_offload
from megatrain.scheduler.effects import kind_of
from megatrain.scheduler.instructions import Bytes, Half, Instruction
from megatrain.scheduler.items import Item, Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.table import Position, Table


class Slots:
    """Fills slots from the host store and gives templates views of them, without a copy.

    Args:
        images: Layout of each block's state.
        engine: Holds the store and the arena that slots are cut from.
        program: Whose blocks they are.
        schedule: Says whose frozen weights stay.
    """

    def __init__(self, images: Sequence[BlockImage], engine: Engine, program: Program, schedule: Table):
        self._images = images
        self._program = program
        self._engine = engine
        self._places: dict[str, torch.Tensor] = {}
        self._at: int | None = None
        self._sampled: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]] | None = None
        self._frozen = {
            block: frozenset(k for k in program.blocks[block].binding if not program.state[k].requires_grad)
            for block in schedule.persistent
        }
        self._num_uses = 0

    @property
    def _store(self) -> HostStore:
        assert self._engine.store is not None
        return self._engine.store

    @property
    def places(self) -> Mapping[str, torch.Tensor]:
        """The place of each tensor of the blocks' state in the store, by key; for a tensor in parts, of one part."""
        if self._at != self._store.num_moves:
            self._at = self._store.num_moves
            self._places = {
                entry.owner: place
                for image in self._images
                for entry, place in zip(image.entries, self._store.bound(image), strict=True)
            }
        return self._places

    def samples(self, keys: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """Returns some bytes of the state of these keys, the same keys each time, as it is in the store."""
        places = self.places
        if self._sampled is None or self._sampled[0] is not places:
            self._sampled = places, {key: sampled(places[key]) for key in keys if places[key].numel()}
        return self._sampled[1]

    def prefetch(self, block: int, where: Bytes | None, *, persists: bool = False) -> None:
        """Copies a block's state to the arena; nothing where state is used in place.

        Args:
            block: The block.
            where: The bytes.
            persists: Its frozen weights may be there from an earlier step.

        Raises:
            ExecuteError: If frozen weights were changed unseen.
        """
        if where is not None and persists:
            self._prefetch_changing(block, where)
        elif where is not None:
            self._store.prefetch(self._images[block], self._engine.arena.write(*where))

    def _prefetch_changing(self, block: int, where: Bytes) -> None:
        """Copies the part of a block's state that changes from step to step, and the rest if it isn't there."""
        arena, layout, frozen = self._engine.arena, self._images[block], self._frozen[block]
        stamp, known, key = self._store.stamp(layout, frozen), arena.persisting(*where), (id(layout), frozen)
        if known is None or stamp is None or known.key != key or not known.is_same(stamp):
            self._store.prefetch(layout, arena.write(*where))
            if stamp is not None:
                known = arena.remembered(key)
                if known is None or not known.is_same(stamp):
                    name, weights = self._program.blocks[block].name, self._store.bytes_of(layout, frozen)
                    known = Persisting.of(name, layout, frozen, stamp, weights)
                arena.persist(*where, known)
            return
        self._num_uses += 1
        # Each step checks a part of about one block, of another one each time.
        if self._num_uses % (len(self._frozen) + 1) == 0:
            try:
                known.check_next()
            except ExecuteError:
                arena.forget(key)
                raise
        self._store.prefetch(layout, arena.slot(*where), without=frozen)

    def state(self, block: int, where: Bytes | None) -> list[torch.Tensor]:
        """Returns a block's state as views of the arena, or of the host store where state is used in place."""
        layout, arena = self._images[block], self._engine.arena
        if where is None:
            return self._store.bound(layout)
        # The engine keeps each image for good, so its address is a name.
        key = (id(layout), where.offset)
        return arena.kept_views(key, lambda: self._store.views(layout, arena.slot(*where)))

    def poison(self, ranges: Sequence[Bytes]) -> None:
        """Fills released bytes with NaN, if a test asked for it."""
        chaos = self._engine.chaos
        if chaos is not None and chaos.poison:
            for where in ranges:
                self._engine.arena.slot(*where).fill_(0xFF)


def forward_without_graph(
    call: Call, block: Block, instruction: Instruction, inputs: Tensors, state: Tensors
) -> Sequence[torch.Tensor]:
    """Runs a forward whose backward will repeat it, and keeps the results that the schedule wants.

    If other kernels run than those that were planned, nothing is kept: the backward computes all of it again.
    """
    runner, needs_grad = call.loaded.runners[block.index], call.loaded.facts.needs_grad[block.index]
    names = call.loaded.results.get(block.index, ()) if instruction.keeps else ()
    notes = runner.noting() if names else None
    if notes is None:
        outputs = runner.forward(inputs, state, needs_grad)
    else:
        outputs = runner.forward(inputs, state, needs_grad, notes=notes)
    kept = None if notes is None else runner.kept(notes)
    if names and kept is None:
        warnings.warn(_OTHER_KERNELS.format(block.index, block.name), DeviceMemoryWarning, stacklevel=2)
    call.keep_results(block.index, kept, names)
    return outputs


_OTHER_KERNELS = (
    "block {} ({}) ran other kernels of attention than it was planned with, and keeps no results: its backward "
    "computes attention again, and may take more memory than the plan says.\n"
    "  Which kernels run depends on torch.backends and torch.nn.attention.sdpa_kernel.\n"
    "  Have the same kernels allowed when a step is planned and when it runs."
)


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
        parts, landing = loaded[0].facts.parts, self._landing(arena)
        self.sink = GradientSink(lambda key: engine.tensors[key], engine.device, parts=parts, landing=landing)
        self._alone, self._is_serial = without_offload(self.instructions), schedule.kind.updates == "serial"
        self._offloads = {each.op.block: each.position for each in self.instructions.all if each.op.what == "G"}

    def _landing(self, arena: LandingArena | None) -> Landing | PlainLanding | None:
        """Returns where gradients land; None for calls whose gradients are made on the host, and stay there."""
        loaded, engine, nbytes = self.loaded[0], self.engine, self.instructions.landing_bytes
        if arena is not None:
            return Landing(nbytes, loaded.program, arena)
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
        for _, number, micro_batch in items:
            call = calls[micro_batch]
            if (name := call.loaded.names[number]) is not None:
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
        """G."""
        first, block = taken.calls[0], taken.calls[0].loaded.program.blocks[instruction.op.block]
        gradients, completes = first.parameter_gradients[block.index], first.loaded.facts.completes[block.index]
        self.sink.receive(block.index, block.binding, gradients, completes, instruction.landing)

    def squares(self, taken: Taken, instruction: Instruction) -> None:
        """S."""
        taken.step_trainer.squares(taken.calls[0].loaded.facts.completes[instruction.op.block])

    def norm(self, taken: Taken, instruction: Instruction) -> None:
        """N."""
        taken.step_trainer.norm()

    def update(self, taken: Taken, instruction: Instruction) -> None:
        """U."""
        taken.step_trainer.update(instruction.op.block)


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
}
"""What does each kind of op, by stream and letter; `megatrain.extending.register_op` adds more."""
