"""Operations: what each instruction does, and how instructions run."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from megatrain.passes.program import Block
from megatrain.runtime.block import LocalGraph
from megatrain.runtime.call import Call, ParameterGradient
from megatrain.runtime.engine import Engine
from megatrain.runtime.gradients import GradientSink
from megatrain.runtime.slots import Slots
from megatrain.runtime.stopwatch import Stopwatch
from megatrain.runtime.streams import Event
from megatrain.scheduler.instructions import Half, Instruction, Instructions
from megatrain.scheduler.lifetimes import Item
from megatrain.scheduler.table import Position


class Trainer(Protocol):
    """Whoever takes a training step: makes losses of outputs, takes gradients, and updates."""

    def before_compute(self, micro_batch: int) -> None:
        """Comes before each F and B, on the caller's thread; what it raises stops the step."""

    def differentiate(self, micro_batch: int, outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Returns the gradients of a micro-batch's outputs, in their order; on the caller's thread."""
        ...

    def receive(self, key: str, gradient: torch.Tensor) -> None:
        """Takes a parameter's whole gradient, on the host; on a transfer's thread."""

    def norm(self) -> None:
        """Takes the norm of all gradients; on the host stream's thread, like `update`."""

    def update(self, block: int) -> None:
        """Updates the parameters that belong to a block."""


class Operations:
    """Runs operations of one schedule on the calls of its micro-batches, one handler per kind.

    It decides nothing: what to prefetch, park, recompute and drop, when and where, is in the instructions.

    Args:
        instructions: What runs.
        slots: Where weights lie meanwhile.
        engine: Streams, host store and arena.
        sink: Takes the gradients of parameters.
    """

    def __init__(self, instructions: Instructions, slots: Slots, engine: Engine, sink: GradientSink):
        self._engine = engine
        self._slots = slots
        self._sink = sink
        blocks = {what: {i.op.block for i in instructions.all if i.op.what == what} for what in "BG"}
        self._without_offload = blocks["B"] - blocks["G"]

    def run(
        self,
        calls: Sequence[Call],
        half: Half,
        *,
        trainer: Trainer | None = None,
        done: set[Position] | None = None,
        is_recovery: bool = False,
        watch: Stopwatch | None = None,
    ) -> None:
        """Hands transfers and work of the host to their streams and runs compute here, in the table's order.

        Args:
            calls: One per micro-batch.
            half: What runs; ops that it waits for and that aren't part of it are over.
            trainer: Of a training step; None for a call.
            done: Operations that are over, and are left out; the others are added as they succeed.
            is_recovery: What an earlier run left is made up for; tests inject no failures.
            watch: Takes the time of each operation.
        """
        done = set() if done is None else done
        left = [instruction for instruction in half.instructions if instruction.position not in done]
        events = {instruction.position: Event(str(instruction.op)) for instruction in left}
        streams = self._engine.streams
        queues = {
            "h2d": streams.h2d.submit,
            "d2h": streams.d2h.submit,
            "host": streams.host.submit,
            "compute": streams.compute.run,
        }
        # Transfers first: they start as soon as what they wait for is done, while compute runs on this thread.
        in_order = sorted(left, key=lambda instruction: instruction.op.stream == "compute")
        try:
            with streams.step(synchronize=False, is_recovery=is_recovery):
                for instruction in in_order:
                    waits, over = self._waits(instruction, events), events[instruction.position]
                    work = self._work(calls, instruction, trainer)
                    work = work if watch is None else watch.timed(instruction, work)
                    queues[instruction.op.stream](str(instruction.op), work, waits, over)
        finally:
            done.update(position for position, event in events.items() if event.host_done and not event.has_failed)
        self.release(calls, half.frees)

    def _waits(self, instruction: Instruction, events: Mapping[Position, Event]) -> list[Event]:
        """Events of these operations; others are over."""
        return [events[w] for w in instruction.waits if w in events]

    def _work(self, calls: Sequence[Call], instruction: Instruction, trainer: Trainer | None) -> Callable[[], None]:
        if instruction.op.stream == "host":
            assert trainer is not None
            is_norm = instruction.op.what == "N"
            return trainer.norm if is_norm else functools.partial(trainer.update, instruction.op.block)
        handler = _HANDLERS[instruction.op.stream, instruction.op.what]

        def work() -> None:
            if trainer is not None and instruction.op.stream == "compute":
                trainer.before_compute(instruction.micro_batch)
            self.release(calls, instruction.frees_before)
            if trainer is not None and instruction.turns:
                self._turn(calls[instruction.micro_batch], instruction.micro_batch, trainer)
            handler(self, calls, instruction)
            self.release(calls, instruction.frees_after)
            self._slots.poison(instruction.leaves)

        return work

    def _turn(self, call: Call, micro_batch: int, trainer: Trainer) -> None:
        """Hands the trainer a micro-batch's outputs, and takes their gradients, ahead of its first B."""
        # The trainer may do with outputs what it likes, but not write into them.
        call.remember_versions(call.loaded.facts.watched)
        outputs = call.loaded.program.outputs
        gradients = trainer.differentiate(micro_batch, [self._output(call, ref.kind, ref.name) for ref in outputs])
        call.check_versions()
        for ref, gradient in zip(outputs, gradients, strict=True):
            if gradient is not None:
                call.add_gradient(ref.name, gradient)

    def _output(self, call: Call, kind: str, name: str) -> torch.Tensor:
        tensor = (
            call.values[name] if kind == "value" else self._engine.tensors[name].to(self._engine.device.torch_device)
        )
        return tensor.detach()

    def release(self, calls: Sequence[Call], items: Sequence[Item]) -> None:
        """Lets go of items."""
        for kind, number, micro_batch in items:
            call = calls[micro_batch]
            call.drop(kind, call.loaded.names[number] if kind in _OF_VALUES else number)

    # -- handlers ------------------------------------------------------------------------------------------

    def prefetch(self, calls: Sequence[Call], instruction: Instruction) -> None:
        """W: copies weights into a slot."""
        self._slots.prefetch(instruction.op.block, instruction.state)

    def park(self, calls: Sequence[Call], instruction: Instruction) -> None:
        """A to the host."""
        call = calls[instruction.micro_batch]
        for value, place in instruction.parked:
            name = call.loaded.names[value]
            call.parks.put(name, call.values[name], place.offset)

    def unpark(self, calls: Sequence[Call], instruction: Instruction) -> None:
        """A to the device."""
        call = calls[instruction.micro_batch]
        for value, _ in instruction.parked:
            name = call.loaded.names[value]
            call.return_value(name, call.parks.get(name))

    def forward(self, calls: Sequence[Call], instruction: Instruction) -> None:
        """F: with its graph retained, or without."""
        call = calls[instruction.micro_batch]
        loaded = call.loaded
        block = loaded.program.blocks[instruction.op.block]
        runner = loaded.runners[block.index]
        inputs = [call.values[name] for name in block.inputs]
        state = self._slots.state(block.index, instruction.state)
        with call.own_generators():
            if instruction.recomputes or call.can_repeat:
                call.rng[block.index] = runner.rng_state()
            if instruction.retains:
                graph = self._graph(call, block, instruction, inputs, state)
                call.graphs[block.index] = graph
                saved = graph.saved_tensors()
                outputs: Sequence[torch.Tensor] = [t.detach() for t in graph.outputs]
            else:
                saved = []
                outputs = runner.forward(inputs, state, loaded.facts.needs_grad[block.index])
        for name, tensor in zip(block.outputs, outputs, strict=True):
            call.set_value(name, tensor)
        call.hold("saved", block.index, saved)
        if instruction.micro_batch + 1 < len(calls):
            call.pass_on(block.outputs, calls[instruction.micro_batch + 1])

    def _graph(self, call: Call, block: Block, instruction: Instruction, inputs: Any, state: Any) -> LocalGraph:
        # The graph keeps this function; it must not keep the call, which keeps the graph.
        states = call.state_of
        states[block.index] = instruction.state
        return call.loaded.runners[block.index].forward_with_graph(
            inputs,
            state,
            call.loaded.facts.needs_grad[block.index],
            call.loaded.facts.is_carried[block.index],
            lambda: self._slots.state(block.index, states[block.index]),
        )

    def backward(self, calls: Sequence[Call], instruction: Instruction) -> None:
        """B: from the retained graph, or recomputed."""
        call = calls[instruction.micro_batch]
        block = call.loaded.program.blocks[instruction.op.block]
        call.state_of[block.index] = instruction.state
        output_gradients = [call.gradients.get(name) for name in block.outputs]
        carried = [call.gradients.get(name) for name in block.inputs]
        if all(g is None for g in output_gradients):
            self._add_gradients(calls, instruction, [None] * len(block.binding))
            return
        graph = call.graphs.get(block.index) or self._recomputed(call, block, instruction)
        try:
            own, parameters = graph.gradients(output_gradients, carried)
        except BaseException:
            # Half of it is gone. A second attempt, if there is one, recomputes.
            call.drop("saved", block.index)
            raise
        for name, gradient in zip(block.inputs, own, strict=True):
            if gradient is not None:
                call.drop("gradient", name)  # the sum so far is part of the new one
                call.set_gradient(name, gradient)
        self._add_gradients(calls, instruction, parameters)

    def _recomputed(self, call: Call, block: Block, instruction: Instruction) -> LocalGraph:
        inputs = [call.values[name] for name in block.inputs]
        with call.loaded.runners[block.index].repeated(call.rng.get(block.index)):
            return self._graph(call, block, instruction, inputs, self._slots.state(block.index, instruction.state))

    def _add_gradients(
        self, calls: Sequence[Call], instruction: Instruction, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Adds one micro-batch's gradients of a block's parameters to those before, in their order."""
        first, block = calls[0], instruction.op.block
        # What others hold too may not become somebody's `.grad`; looked up before it counts as held here.
        landings = [(g, is_shared) for g, is_shared in zip(gradients, self._are_shared(gradients), strict=True)]
        known = first.parameter_gradients.get(block)
        if known is not None:
            landings = [_added(*pair) for pair in zip(known, landings, strict=True)]
        first.parameter_gradients[block] = landings
        first.hold("parameters", block, [gradient for gradient, _ in landings])
        if block in self._without_offload and instruction.micro_batch == len(calls) - 1:
            self.offload(calls, instruction)  # there is nothing to move, so there is no G

    def _are_shared(self, gradients: Sequence[torch.Tensor | None]) -> list[bool]:
        """Tells of each gradient whether its memory is also that of a value, or of another of them."""
        places = [g.untyped_storage().data_ptr() for g in gradients if g is not None and g.layout == torch.strided]
        count = Counter(places)
        return [
            g is not None
            and (self._engine.meter.has(g) or (g.layout == torch.strided and count[g.untyped_storage().data_ptr()] > 1))
            for g in gradients
        ]

    def offload(self, calls: Sequence[Call], instruction: Instruction) -> None:
        """G."""
        loaded, block = calls[0].loaded, calls[0].loaded.program.blocks[instruction.op.block]
        gradients = calls[0].parameter_gradients[block.index]
        completes = loaded.facts.completes[block.index]
        self._sink.receive(block.index, block.binding, gradients, completes, instruction.landing)


def _added(before: ParameterGradient, now: ParameterGradient) -> ParameterGradient:
    """Adds a gradient to the sum of those before; in place where the sum is nobody else's."""
    (total, is_shared), (gradient, _) = before, now
    if total is None or gradient is None:
        return now if total is None else before
    if is_shared or total.layout != torch.strided or total.untyped_storage().nbytes() != total.nbytes:
        # Sparse ones join their parts, and a dense one takes a sparse one up only from the left.
        is_swapped = total.is_sparse and not gradient.is_sparse
        return (gradient + total if is_swapped else total + gradient), False
    return total.add_(gradient), False


_OF_VALUES = ("value", "gradient", "original")

_HANDLERS: dict[tuple[str, str], Callable[[Operations, Sequence[Call], Instruction], None]] = {
    ("h2d", "W"): Operations.prefetch,
    ("h2d", "A"): Operations.unpark,
    ("compute", "F"): Operations.forward,
    ("compute", "B"): Operations.backward,
    ("d2h", "A"): Operations.park,
    ("d2h", "G"): Operations.offload,
}
