"""Executor: runs a schedule, one handler per kind of operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megatrain.passes.program import Block, Program
from megatrain.runtime.block import LocalGraph
from megatrain.runtime.call import DONE, FAILED, OPEN, Call
from megatrain.runtime.engine import Engine
from megatrain.runtime.facts import Facts
from megatrain.runtime.gradients import GradientSink, Take
from megatrain.runtime.plan import Plan, Planned, Release, cold_schedule, plan_schedule
from megatrain.runtime.rng import repeated_rng
from megatrain.runtime.slots import Slots
from megatrain.runtime.start import Start
from megatrain.runtime.streams import Event
from megatrain.scheduler.table import Position, Schedule


class Executor:
    """Runs the operations of a schedule in its order, each after those it waits for.

    It decides nothing: what to prefetch, park, recompute and drop, when and where, is in the schedule.

    Args:
        program: The blocks.
        schedule: A checked schedule of that program.
        model: The model, whose parameters move into a host store; or the engine that holds it already.
    """

    def __init__(self, program: Program, schedule: Schedule, model: nn.Module | Engine):
        engine = model if isinstance(model, Engine) else Engine(model, program.device)
        self.program = program
        self.schedule = schedule
        self._engine = engine
        images = engine.adopt(program)
        self._slots = Slots(schedule, images, engine)
        self._runners = [engine.runner(program.templates[b.template]) for b in program.blocks]
        self._plan = plan_schedule(schedule)
        self._names = list(program.values)
        self._specs = [value.spec for value in program.values.values()]
        self._resumed: Plan | None = None
        self.facts = Facts.of(program, is_training=schedule.mode == "train")
        self.differentiable_outputs = self.facts.differentiable_outputs
        self.differentiable_inputs = self.facts.differentiable_inputs
        works = schedule.known_workload().blocks
        self._has_empty_gradients = [w.has_backward and not w.gradient_bytes for w in works]
        slab_bytes = max((image.nbytes for image in images), default=0)
        is_bound = schedule.transfer == "bind"
        parts = self.facts.parts
        self._sink = GradientSink(lambda key: engine.tensors[key], engine.device, slab_bytes, parts, in_place=is_bound)

    # -- calls ---------------------------------------------------------------------------------------------

    def parameters(self) -> list[torch.Tensor]:
        """The parameters that a backward gives gradients to, as they are now, in the order of `facts.trained`."""
        self._engine.find_replaced()
        return [self._engine.tensors[key] for key in self.facts.trained]

    def forward(self, inputs: Sequence[torch.Tensor]) -> Call:
        """Runs the forward half of the schedule.

        Args:
            inputs: The model's tensor inputs on the compute device, in order.

        Returns:
            The call; `call.outputs` holds the model's output tensors, in order.

        Raises:
            ExecuteError: If an operation on a transfer stream fails. What the model's own code raises passes
                unchanged.
        """
        engine = self._engine
        with engine.turn():
            engine.refresh()
            return self._run_forward(Start.of(self.program, inputs, engine.tensors, self._slots.places), commits=True)

    def _run_forward(self, start: Start, *, commits: bool) -> Call:
        engine = self._engine
        parks = engine.parks.take([self._specs[v] for v in self._plan.parked_values])
        call = Call(engine.meter, parks, start)
        try:
            engine.arena.ensure(self._plan.arena_bytes)
            engine.meter.set_arena(engine.arena.nbytes)
            self._set_inputs(call, start)
            engine.give_slots(None)
            self._run(call, self._plan.forward, self._plan.forward_ends)
            engine.give_slots(call)
            if commits:
                self._commit_buffers(call)
            call.outputs = [self._output(call, ref.kind, ref.name) for ref in self.program.outputs]
            call.remember_versions(self.facts.watched)
            return call
        except BaseException:
            call.close(FAILED)
            raise

    def backward(
        self,
        call: Call,
        gradients: Sequence[torch.Tensor | None],
        *,
        keep_graph: bool = False,
        take: Take | None = None,
    ) -> list[torch.Tensor | None]:
        """Runs the backward half of the schedule and adds to the parameters' `.grad`.

        The first backward of a call continues its forward. A later one repeats the forward half, buffers aside.

        Args:
            call: A call of this executor.
            gradients: One per output of the model; None where there is none.
            keep_graph: Outputs that have a gradient here may be differentiated once more.
            take: Gets each parameter's key and whole gradient, on the host, instead of its `.grad`.

        Returns:
            The gradients of the differentiable inputs.

        Raises:
            ExecuteError: If one of the outputs was differentiated before without `keep_graph`, or what the backward
                needs has changed since.
        """
        with self._engine.turn():
            outputs = [i for i, gradient in enumerate(gradients) if gradient is not None]
            start = call.check_open(outputs)
            call.check_versions()
            start.check_state(self.facts.read_backward if call.status == OPEN else start.state)
            running = call if call.status == OPEN else self._replay(start)
            if not keep_graph:
                call.spend(outputs, self.differentiable_outputs)
            try:
                found = self._run_backward(running, gradients, take)
            except BaseException:
                running.close(FAILED)
                call.close(FAILED)
                raise
            running.close(DONE)
            return found

    def _replay(self, start: Start) -> Call:
        """Runs the forward half once more, for the backward alone: no buffer is written, no random number consumed."""
        start.check_inputs()
        with torch.no_grad(), repeated_rng(start.rng, self._engine.device, self.program.opaque_calls):
            return self._run_forward(start, commits=False)

    def _run_backward(
        self, call: Call, gradients: Sequence[torch.Tensor | None], take: Take | None
    ) -> list[torch.Tensor | None]:
        engine = self._engine
        for ref, gradient in zip(self.program.outputs, gradients, strict=True):
            if gradient is not None:
                self._add_gradient(call, ref.name, gradient)
        self._sink.begin(take)
        is_warm = engine.has_slots(call)
        engine.give_slots(None)
        plan = self._plan if is_warm else self._cold_plan()
        engine.arena.ensure(plan.arena_bytes)
        self._run(call, plan.backward, plan.backward_ends)
        return [call.gradients.get(self.program.inputs[i]) for i in self.differentiable_inputs]

    def _cold_plan(self) -> Plan:
        """The backward of a call after which another used the slots: it prefetches everything anew."""
        if self._resumed is None:
            self._resumed = plan_schedule(cold_schedule(self.schedule))
        return self._resumed

    def _set_inputs(self, call: Call, start: Start) -> None:
        for name, tensor in start.inputs.items():
            call.set_value(name, tensor)
        for name, buffer in start.buffers.items():
            call.set_value(name, buffer.to(self._engine.device, copy=True))
        for name, constant in self.program.constants.items():
            call.set_value(name, constant)

    def _commit_buffers(self, call: Call) -> None:
        with torch.no_grad():
            for key, name in self.program.commits:
                self._engine.tensors[key].copy_(call.values[name])

    def _output(self, call: Call, kind: str, name: str) -> torch.Tensor:
        return call.values[name].detach() if kind == "value" else self.state_output(name)

    def state_output(self, key: str) -> torch.Tensor:
        """Returns a parameter or buffer that the model returns: the tensor itself where the device is the host."""
        state = self._engine.tensors[key]
        return state if state.device == self._engine.device else state.to(self._engine.device)

    # -- running the table ---------------------------------------------------------------------------------

    def _run(self, call: Call, steps: Sequence[Planned], ends: Sequence[Release]) -> None:
        """Hands transfers to their streams and runs compute here, in the table's order."""
        streams = self._engine.streams
        events = {step.position: Event(str(step.op)) for step in steps}
        queues = {"h2d": streams.h2d.submit, "d2h": streams.d2h.submit, "compute": streams.compute.run}
        # Transfers first: they start as soon as what they wait for is done, while compute runs on this thread.
        in_order = sorted(steps, key=lambda step: step.op.stream == "compute")
        with streams.step(synchronize=False):
            for step in in_order:
                waits, done = self._waits(step, events), events[step.position]
                queues[step.op.stream](str(step.op), self._handler(call, step), waits, done)
        self._release(call, ends)

    def _waits(self, step: Planned, events: dict[Position, Event]) -> list[Event]:
        """Events of this half of the table; those of the other half are over."""
        return [events[w] for w in step.waits if w in events]

    def _handler(self, call: Call, step: Planned) -> Callable[[], None]:
        handler = _HANDLERS[step.op.stream, step.op.what]

        def work() -> None:
            self._release(call, step.released_before)
            handler(self, call, step)
            self._release(call, step.released_after)
            self._slots.poison(step.freed_ranges)

        return work

    def _release(self, call: Call, items: Sequence[Release]) -> None:
        for kind, number in items:
            call.drop(kind, self._names[number] if kind in _OF_VALUES else number)

    # -- handlers ------------------------------------------------------------------------------------------

    def _prefetch(self, call: Call, step: Planned) -> None:
        assert step.op.slot is not None
        self._slots.prefetch(step.op.block, step.op.slot)

    def _park(self, call: Call, step: Planned) -> None:
        for value in step.values:
            name = self._names[value]
            call.parks.put(name, call.values[name])

    def _unpark(self, call: Call, step: Planned) -> None:
        for value in step.values:
            name = self._names[value]
            call.return_value(name, call.parks.get(name, self._engine.device))

    def _forward(self, call: Call, step: Planned) -> None:
        block = self.program.blocks[step.op.block]
        runner = self._runners[block.index]
        inputs = [call.values[name] for name in block.inputs]
        state = self._slots.state(block.index, step.slot)
        if step.saves:
            graph = self._graph(call, block, step, inputs, state)
            call.graphs[block.index] = graph
            saved = graph.saved_tensors()
            outputs: Sequence[torch.Tensor] = [t.detach() for t in graph.outputs]
        else:
            saved = []
            if step.is_recomputed:
                call.rng[block.index] = runner.rng_state()
            outputs = runner.forward(inputs, state, self.facts.needs_grad[block.index])
        for name, tensor in zip(block.outputs, outputs, strict=True):
            call.set_value(name, tensor)
        call.hold("saved", block.index, saved)

    def _graph(self, call: Call, block: Block, step: Planned, inputs: Any, state: Any) -> LocalGraph:
        # The graph keeps this function; it must not keep the call, which keeps the graph.
        slots = call.slot_of
        slots[block.index] = step.slot
        return self._runners[block.index].forward_with_graph(
            inputs,
            state,
            self.facts.needs_grad[block.index],
            self.facts.is_carried[block.index],
            lambda: self._slots.state(block.index, slots[block.index]),
        )

    def _backward(self, call: Call, step: Planned) -> None:
        block = self.program.blocks[step.op.block]
        call.slot_of[block.index] = step.slot
        output_gradients = [call.gradients.get(name) for name in block.outputs]
        carried = [call.gradients.get(name) for name in block.inputs]
        graph = call.graphs.get(block.index)
        if graph is None and any(g is not None for g in output_gradients):
            inputs = [call.values[name] for name in block.inputs]
            rng = call.rng.get(block.index)
            with self._runners[block.index].repeated(rng):
                graph = self._graph(call, block, step, inputs, self._slots.state(block.index, step.slot))
        if graph is None or all(g is None for g in output_gradients):
            call.parameter_gradients[block.index] = [(None, False)] * len(block.binding)
            return
        own, parameters = graph.gradients(output_gradients, carried)
        for name, gradient in zip(block.inputs, own, strict=True):
            if gradient is not None:
                call.drop("gradient", name)  # the sum so far is part of the new one
                call.set_gradient(name, gradient)
        # What others hold too may not become somebody's `.grad`; looked up before it counts as held here.
        is_shared = [g is not None and self._engine.meter.has(g) for g in parameters]
        call.parameter_gradients[block.index] = list(zip(parameters, is_shared, strict=True))
        call.hold("parameters", block.index, parameters)
        if self._has_empty_gradients[block.index]:
            self._offload(call, step)  # there is nothing to move, so the table has no G

    def _offload(self, call: Call, step: Planned) -> None:
        block = self.program.blocks[step.op.block]
        gradients = call.parameter_gradients[block.index]
        self._sink.receive(block.binding, gradients, self.facts.completes[block.index])

    def _add_gradient(self, call: Call, name: str, gradient: torch.Tensor) -> None:
        known = call.gradients.get(name)
        call.set_gradient(name, gradient if known is None else known + gradient)


_OF_VALUES = ("value", "gradient", "original")

_HANDLERS: dict[tuple[str, str], Callable[[Executor, Call, Planned], None]] = {
    ("h2d", "W"): Executor._prefetch,
    ("h2d", "A"): Executor._unpark,
    ("compute", "F"): Executor._forward,
    ("compute", "B"): Executor._backward,
    ("d2h", "A"): Executor._park,
    ("d2h", "G"): Executor._offload,
}
