"""Executor: runs the schedule of a call, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatrain.checks import checked, shown
from megatrain.errors import ExecuteError, ScheduleError
from megatrain.passes.program import Program
from megatrain.runtime.call import DONE, FAILED, OPEN, Call
from megatrain.runtime.engine import Engine
from megatrain.runtime.gradients import GradientSink, Take
from megatrain.runtime.loaded import Loaded
from megatrain.runtime.operations import Operations
from megatrain.runtime.rng import repeated_rng
from megatrain.runtime.slots import Slots
from megatrain.runtime.start import Start
from megatrain.scheduler.builder.build import backward_schedule
from megatrain.scheduler.instructions import Instructions
from megatrain.scheduler.schedule import Schedule


class Executor:
    """Runs the forward and the backward of calls, as their schedule says.

    Args:
        program: The blocks.
        schedule: A checked schedule of that program.
        model: The model, whose parameters move into a host store; or the engine that holds it already.
    """

    @checked()
    def __init__(self, program: Program, schedule: Schedule, model: nn.Module | Engine):
        if schedule.num_blocks != len(program.blocks):
            raise ExecuteError(
                f"the schedule has {schedule.num_blocks} blocks, the program has {len(program.blocks)}.\n"
                "  A schedule runs the program that it was made for.\n  Give megatrain.schedule(program)."
            )
        if schedule.kind.is_training_step:
            raise ScheduleError(_TRAINING_STEP)
        engine = model if isinstance(model, Engine) else Engine(model, program.device)
        self.program = program
        self.schedule = schedule
        self._engine = engine
        self.loaded = Loaded.of(program, engine, is_training=schedule.kind.mode == "train")
        self._slots = Slots(self.loaded.images, engine)
        self._instructions = schedule.instructions
        self._resumed: Instructions | None = None
        self.facts = self.loaded.facts
        self.differentiable_outputs = self.facts.differentiable_outputs
        self.differentiable_inputs = self.facts.differentiable_inputs
        self._sink = GradientSink.of(self.loaded, engine, self._instructions.landing_bytes)
        self._operations = Operations(self._instructions, self._slots, engine, self._sink)

    # -- calls ---------------------------------------------------------------------------------------------

    def parameters(self) -> list[torch.Tensor]:
        """The parameters that a backward gives gradients to, as they are now, in the order of `facts.trained`."""
        self._engine.find_replaced()
        return [self._engine.tensors[key] for key in self.facts.trained]

    @checked()
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
        _check_number("inputs", inputs, self.program.inputs)
        with engine.turn.run():
            engine.refresh()
            start = Start.of(self.program, inputs, engine.tensors, self._slots.places, engine.device)
            return self._run_forward(start, commits=True)

    def _run_forward(self, start: Start, *, commits: bool) -> Call:
        engine = self._engine
        parks = engine.parks.take(self._instructions.park_bytes)
        call = Call(engine.meter, parks, start, self.loaded)
        try:
            engine.arena.ensure(self._instructions.slot_bytes)
            engine.meter.set_arena(engine.arena.nbytes)
            call.begin(engine.device)
            engine.give_slots(None)
            self._operations.run([call], self._instructions.forward)
            engine.give_slots(call)
            if commits:
                self._commit_buffers(call)
            call.outputs = [self._output(call, ref.kind, ref.name) for ref in self.program.outputs]
            call.remember_versions(self.facts.watched)
            return call
        except BaseException:
            call.close(FAILED)
            raise

    @checked()
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
        _check_number("gradients", gradients, self.program.outputs)
        with self._engine.turn.run(differentiates=True):
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
                call.add_gradient(ref.name, gradient)
        self._sink.begin(take)
        is_warm = engine.has_slots(call)
        engine.give_slots(None)
        instructions = self._instructions if is_warm else self._cold()
        engine.arena.ensure(instructions.slot_bytes)
        self._operations.run([call], instructions.backward)
        return [call.gradients.get(self.program.inputs[i]) for i in self.differentiable_inputs]

    def _cold(self) -> Instructions:
        """The backward of a call after which another used the slots: it prefetches everything anew."""
        if self._resumed is None:
            self._resumed = _cold_schedule(self.schedule).instructions
        return self._resumed

    def _commit_buffers(self, call: Call) -> None:
        with torch.no_grad():
            for key, name in self.program.commits:
                self._engine.tensors[key].copy_(call.values[name])

    def _output(self, call: Call, kind: str, name: str) -> torch.Tensor:
        return call.values[name].detach() if kind == "value" else self.state_output(name)

    @checked()
    def state_output(self, key: str) -> torch.Tensor:
        """Returns a parameter or buffer that the model returns: the tensor itself where the device is the host.

        Raises:
            ExecuteError: If the model has none of this name.
        """
        if key not in self._engine.tensors:
            raise ExecuteError(
                f"the model has no parameter or buffer {shown(key)}.\n  They have the names of its state_dict.\n"
                f"  It has {shown(list(self._engine.tensors))}."
            )
        state, device = self._engine.tensors[key], self._engine.device.torch_device
        return state if state.device == device else state.to(device)


def _check_number(name: str, given: Sequence[object], wanted: Sequence[object]) -> None:
    if len(given) != len(wanted):
        raise ExecuteError(
            f"{name} has {len(given)} items, not {len(wanted)}.\n"
            "  Each input of the program has one input, and each output a gradient or None, in order.\n"
            "  Look at program.inputs and program.outputs."
        )


def _cold_schedule(warm: Schedule) -> Schedule:
    """The backward alone, checked, in the memory that `warm` takes if possible."""
    try:
        cold = backward_schedule(warm, memory=warm.device_bytes)
    except ScheduleError:
        cold = backward_schedule(warm, num_slots=1)
    cold.check()
    return cold


_TRAINING_STEP = (
    "the schedule is of a whole training step.\n"
    "  An Executor runs one call: a forward and its backward; updates are the caller's.\n"
    "  Build it without micro_batches, updates, clip and outputs, or run it by a TrainStep."
)
