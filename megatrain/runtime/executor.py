"""Executor: runs the schedule of a call, forward and backward, or of a whole training step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from megatrain.checks import checked, shown
from megatrain.counts import counted
from megatrain.device import Device
from megatrain.errors import ExecuteError, ScheduleError
from megatrain.memory.out_of_memory import Attempts, MemoryFigures
from megatrain.passes.program import Program
from megatrain.runtime.call import DONE, FAILED, OPEN, Call
from megatrain.runtime.call_start import Start
from megatrain.runtime.engine import Engine
from megatrain.runtime.gradients.landing import LandingArena
from megatrain.runtime.gradients.sink import Take, keeps_of
from megatrain.runtime.loaded import Loaded, check_fits
from megatrain.runtime.operations import Operations
from megatrain.runtime.random_calls import MicroBatchGenerators, repeated_rng
from megatrain.runtime.streams.events import Watch
from megatrain.runtime.taken import StepTrainer
from megatrain.scheduler.builder.build import backward_schedule
from megatrain.scheduler.effects import BUILT_IN
from megatrain.scheduler.instructions import Half, Instructions
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.table import Position


class Run:
    """One run of a schedule. After a failure a training step can continue, or be dropped.

    Only the trainer's work outlives a run, and buffers: each micro-batch's are written when its backward begins, as its
    loss may look at them, at the latest by `commit`.

    Args:
        operations: Runs the instructions.
        starts: The starting state of each micro-batch; a call has one.
        can_repeat: A backward may be attempted again.
        watch: Takes the time of each operation.

    Attributes:
        calls: One per micro-batch.
    """

    def __init__(
        self,
        operations: Operations,
        starts: Sequence[Start],
        *,
        can_repeat: bool = False,
        watch: Watch | None = None,
    ):
        self._operations = operations
        self._watch = watch
        if watch is not None:
            watch.restart()  # an attempt that failed may have left times
        self._done: set[Position] = set()
        engine = operations.engine
        self.calls: list[Call] = []
        parked = engine.parks.take(operations.instructions.park_bytes, len(starts))
        draws, are_random = [each.draws for each in operations.loaded], [start.rng is not None for start in starts]
        generators = MicroBatchGenerators.of(draws, are_random, engine.device)
        for loaded, start, parks, own in zip(operations.loaded, starts, parked, generators, strict=True):
            self.calls.append(Call(engine.meter, parks, start, loaded, generators=own, can_repeat=can_repeat))

    @property
    def device(self) -> Device:
        """The compute device."""
        return self._operations.engine.device

    def begin(self) -> None:
        """Makes everything that the forward starts from ready."""
        engine = self._operations.engine
        engine.give_slots(None)  # another size loses what they hold, also if it fails
        operations = self._operations
        scheduled = operations.schedule.device_bytes
        engine.reserve_slots(operations.instructions.slot_bytes, scheduled)
        if engine.is_tight(scheduled):
            operations.segments.make()
        for number, call in enumerate(self.calls):
            call.begin(engine.buffers if number == 0 else None)
        for call, later in pairwise(self.calls):
            call.pass_on(call.loaded.program.inputs, later)

    def forward(self) -> None:
        """Runs a call until it has its outputs.

        Raises:
            ExecuteError: If an operation on a stream's own thread fails. What compute raises passes unchanged.
        """
        self.begin()
        self._go(self._operations.instructions.forward, None)

    def go(self, trainer: StepTrainer) -> None:
        """Runs a training step.

        Raises:
            ExecuteError: See `forward`.
        """
        self.begin()
        self._operations.sink.begin(trainer.receive, trainer.exchange.land)
        self._go(self._operations.instructions.backward, trainer)

    def complete(self, trainer: StepTrainer) -> None:
        """Runs the rest of a training step after a failure, except the work of the host, which the trainer does itself.

        Raises:
            ExecuteError: See `forward`.
        """
        instructions = self._operations.instructions.all
        self._done.update(instruction.position for instruction in instructions if instruction.op.stream == "host")
        self._operations.sink.stop_reuse()
        self._go(self._operations.instructions.backward, trainer, is_recovery=True)

    def _go(self, half: Half, trainer: StepTrainer | None, *, is_recovery: bool = False) -> None:
        self._operations.run(
            self.calls, half, trainer=trainer, done=self._done, is_recovery=is_recovery, watch=self._watch
        )

    def write_buffers(self) -> None:
        """Writes the buffers as the last micro-batch left them, unless its backward has begun and they are written."""
        self.calls[-1].write_buffers(self._operations.engine)

    def leave_generators(self) -> None:
        """Sets the global generators to the end of the last forward, from which code after a training step draws."""
        self.calls[-1].generators.leave(self.device)

    def commit(self) -> None:
        """Writes the buffers, and ends a training step."""
        self.write_buffers()
        self.close(DONE)

    def close(self, status: str = FAILED) -> None:
        """Ends the run and releases everything that it held; one that failed leaves buffers as they were before it."""
        self._operations.sink.end()
        for call in self.calls:
            if status == FAILED:
                call.restore_buffers()
            call.close(status)


class _Once:
    """Hands each parameter's gradient on once: a backward that is repeated makes those again that came before.

    Attributes:
        keeps: See `Take`.
    """

    def __init__(self, take: Take):
        self._take = take
        self.keeps = keeps_of(take)
        self._known: set[str] = set()

    def __call__(self, key: str, gradient: torch.Tensor) -> None:
        """See `Take`."""
        if key not in self._known:
            self._take(key, gradient)
            self._known.add(key)


class Executor:
    """Runs a schedule: the forward and the backward of calls, or whole training steps.

    Args:
        program: The blocks; of a training step one program per micro-batch, with the same blocks of state.
        schedule: A checked schedule of that program, or of the programs' merged workload.
        model: The model, whose parameters move into a host store; or the engine that holds it already.
        arena: Where gradients of a training step wait for their updates; None takes one of its own.
        merged: The programs in the order in which their workloads were merged; None is that of first use.

    Raises:
        ExecuteError: If the schedule is of other programs.
        ScheduleError: If the programs can't share blocks.
    """

    @checked()
    def __init__(
        self,
        program: Program | Sequence[Program],
        schedule: Schedule,
        model: nn.Module | Engine,
        *,
        arena: LandingArena | None = None,
        merged: Sequence[Program] | None = None,
    ):
        programs = [program] if isinstance(program, Program) else list(program)
        check_fits(programs, schedule)
        engine = model if isinstance(model, Engine) else Engine(model, programs[0].device)
        self.program = programs[0]
        self.schedule = schedule
        self.engine = engine
        loaded = Loaded.of_each(programs, merged, engine, is_training=schedule.kind.mode == "train")
        if schedule.kind.is_training_step and arena is None:
            arena = LandingArena(engine.bus)
        for each in loaded:
            each.check_recomputed(schedule.saves)
        self._operations = Operations(loaded, schedule, engine, arena)
        self._resumed: tuple[Instructions, int] | None = None
        self.loaded = loaded[0]
        self.facts = self.loaded.facts
        self.differentiable_outputs = self.facts.differentiable_outputs
        self.differentiable_inputs = self.facts.differentiable_inputs

    @property
    def memory_figures(self) -> MemoryFigures:
        """What is known of the device's memory, for errors."""
        return self.engine.memory_figures(self.schedule.device_bytes)

    # -- training steps ------------------------------------------------------------------------------------

    @property
    def trained(self) -> Sequence[Sequence[str]]:
        """Keys of the parameters whose gradient is whole with each block's."""
        known = set(self.facts.trained)
        return [[key for key in keys if key in known] for keys in self.facts.completes]

    @checked()
    def begin(
        self,
        inputs: Sequence[Sequence[torch.Tensor]],
        *,
        watch: Watch | None = None,
    ) -> Run:
        """Takes the inputs of a training step.

        Args:
            inputs: Per micro-batch: the model's tensor inputs, in order, each where `program.values` has it.
            watch: Takes the time of each operation.

        Raises:
            ScheduleError: If the schedule is of a call.
            ExecuteError: If there are inputs of other micro-batches, or too few or many of one.
        """
        if not self.schedule.kind.is_training_step:
            raise ScheduleError(_CALL)
        _check_number("inputs", inputs, self._operations.loaded)
        for loaded, tensors in zip(self._operations.loaded, inputs, strict=True):
            _check_number("inputs", tensors, loaded.program.inputs)
        self.engine.refresh()
        starts = [self._operations.start(tensors, number) for number, tensors in enumerate(inputs)]
        return Run(self._operations, starts, can_repeat=True, watch=watch)

    # -- calls ---------------------------------------------------------------------------------------------

    def parameters(self) -> list[torch.Tensor]:
        """The parameters that a backward gives gradients to, as they are now, in the order of `facts.trained`."""
        self.engine.find_replaced()
        return [self.engine.tensors[key] for key in self.facts.trained]

    @checked()
    def forward(self, inputs: Sequence[torch.Tensor]) -> Call:
        """Runs the forward half of the schedule.

        Args:
            inputs: The model's tensor inputs, in order, each on the compute device or, if `program.values` says so, on
                the host.

        Returns:
            The call; `call.outputs` holds the model's output tensors, in order.

        Raises:
            ScheduleError: If the schedule is of a training step.
            ExecuteError: If an operation on a transfer stream fails. What the model's own code raises passes
                unchanged.
        """
        if self.schedule.kind.is_training_step:
            raise ScheduleError(_TRAINING_STEP)
        _check_number("inputs", inputs, self.program.inputs)
        with self.engine.turn.run():
            self.engine.refresh()
            return self._run_forward(self._operations.start(inputs), commits=True)

    def _run_forward(self, start: Start, *, commits: bool) -> Call:
        run = Run(self._operations, [start])
        try:
            run.forward()
            (call,) = run.calls
            self.engine.give_slots(call)
            if commits:
                run.write_buffers()
            call.outputs = [self._output(call, ref.kind, ref.name) for ref in self.program.outputs]
            call.remember_versions(self.facts.watched)
            if commits and self.differentiable_outputs:
                call.remember_bytes(start, self._operations.slots.samples(self.facts.read_backward))
            return call
        except BaseException:
            run.close()
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
        with self.engine.turn.run(differentiates=True):
            outputs = [i for i, gradient in enumerate(gradients) if gradient is not None]
            start = call.check_open(outputs)
            call.check_versions()
            start.check_state(self.facts.read_backward if call.status == OPEN else start.state, self.facts.movable)
            check_late = call.check_bytes(start, self._operations.slots.samples(self.facts.read_backward))
            running = call if call.status == OPEN else self._replay(start)
            if not keep_graph:
                call.spend(outputs, self.differentiable_outputs)
            kept = call.start
            found = self._repeatable(call, running, start, gradients, take)
            call.status, call.start = DONE, kept
            check_late()
            return found

    def _repeatable(
        self,
        call: Call,
        running: Call | None,
        start: Start,
        gradients: Sequence[torch.Tensor | None],
        take: Take | None,
    ) -> list[torch.Tensor | None]:
        """Runs a backward; if it runs out of memory again from the start of the call, which needs no retained graph."""
        once = _Once(take or self._operations.sink.accumulation)
        attempts = Attempts("the backward", self.engine.device)
        while True:
            try:
                running = self._replay(start) if running is None else running
                found = self._run_backward(running, gradients, once)
            except BaseException as error:
                for failed in (call, running):
                    if failed is not None:
                        failed.close(FAILED)
                running = failed = None
                if not attempts.may_repeat(error, self.memory_figures):
                    raise
            else:
                running.close(DONE)
                attempts.over(self.memory_figures)
                return found

    def _replay(self, start: Start) -> Call:
        """Runs the forward half once more, for the backward alone: no buffer is written, no random number consumed."""
        start.check_inputs()
        with torch.no_grad(), repeated_rng(start.rng, self.engine.device, self.program.opaque_calls):
            return self._run_forward(start, commits=False)

    def _run_backward(
        self, call: Call, gradients: Sequence[torch.Tensor | None], take: Take | None
    ) -> list[torch.Tensor | None]:
        for ref, gradient in zip(self.program.outputs, gradients, strict=True):
            if gradient is not None:
                call.add_gradient(ref.name, gradient)
        self._operations.sink.begin(take)
        is_warm = self.engine.has_slots(call)
        self.engine.give_slots(None)
        warm = self._operations.instructions, self.schedule.device_bytes
        instructions, device_bytes = warm if is_warm else self._cold()
        self.engine.reserve_slots(instructions.slot_bytes, device_bytes)
        try:
            self._operations.run([call], instructions.backward)
        finally:
            self._operations.sink.end()
        return [call.gradients.get(self.program.inputs[i]) for i in self.differentiable_inputs]

    def _cold(self) -> tuple[Instructions, int]:
        """The backward of a call after which another used the slots, and its device bytes: it prefetches all anew."""
        if any((op.stream, op.what) not in BUILT_IN for op in self.schedule.ops):
            raise ExecuteError(_FURTHER_OPS)
        if self._resumed is None:
            try:  # in the memory that the call takes, if possible
                cold = backward_schedule(self.schedule, memory=self.schedule.device_bytes)
            except ScheduleError:
                cold = backward_schedule(self.schedule, num_slots=1)
            self._resumed = cold.instructions, cold.device_bytes
        return self._resumed

    def _output(self, call: Call, kind: str, name: str) -> torch.Tensor:
        return call.values[name].detach() if kind == "value" else self.state_output(name)

    def state_output(self, key: str) -> torch.Tensor:
        """Returns a parameter or buffer that the model returns: the tensor itself where the device is the host.

        Raises:
            ExecuteError: If the model has none of this name.
        """
        if key not in self.engine.tensors:
            raise ExecuteError(
                f"the model has no parameter or buffer {shown(key)}.\n  Names are those of the model's state_dict.\n"
                f"  It has {shown(list(self.engine.tensors))}."
            )
        state, device = self.engine.tensors[key], self.engine.device.torch_device
        return state if state.device == device else state.to(device)


def _check_number(name: str, given: Sequence[object], wanted: Sequence[object]) -> None:
    if len(given) != len(wanted):
        raise ExecuteError(
            f"{name} has {counted(len(given), 'item')}, not {len(wanted)}.\n"
            "  Each micro-batch has inputs, one for each input of its program; each output has a gradient or None.\n"
            "  Look at program.inputs and program.outputs."
        )


_FURTHER_OPS = (
    "another call used the slots between this call's forward and its backward.\n"
    "  The backward then needs another table, in which megatrain can't place your own kinds of ops.\n"
    "  Run each call's backward before the next call."
)
_TRAINING_STEP = (
    "the schedule is a whole training step, which has no separate forward.\n"
    "  A training step begins with the inputs of its micro-batches, and then runs with a trainer.\n"
    "  Run it with a TrainStep, or call begin(inputs).go(trainer).\n"
    "  For a call, build the schedule without micro_batches, updates, clip and outputs."
)
_CALL = (
    "the schedule is a call, not a training step.\n"
    "  A call runs with forward(inputs) and backward(call, gradients); its results belong to the caller.\n"
    "  Call these, or build the schedule with updates."
)
