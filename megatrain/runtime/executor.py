"""Executor: runs the schedule of a call, forward and backward, or of a whole training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import torch
from torch import nn

from megatrain.base.checks import checked, shown
from megatrain.base.counts import counted
from megatrain.device import is_on_host
from megatrain.device.bus import GrowingArena
from megatrain.device.device_budget import Attempts, MemoryFigures
from megatrain.errors import ExecuteError, ScheduleError
from megatrain.files.scratch_file import ScratchFile
from megatrain.passes.program import Program
from megatrain.runtime.accumulation import Take
from megatrain.runtime.call import DONE, FAILED, OPEN, Call
from megatrain.runtime.engine import Engine
from megatrain.runtime.loaded import Facts, Loaded, serving
from megatrain.runtime.operations import Operations, Run
from megatrain.runtime.random_calls import repeated_rng
from megatrain.runtime.streams.events import Watch
from megatrain.runtime.versions import Start
from megatrain.scheduler.builder.build import backward_schedule
from megatrain.scheduler.effects import BUILT_IN
from megatrain.scheduler.instructions import Bytes, Instructions
from megatrain.scheduler.schedule import Schedule


class Executor:
    """Runs a schedule: the forward and the backward of calls, or whole training steps.

    Args:
        program: The blocks; of a training step one program per micro-batch, with the same blocks of state.
        schedule: A checked schedule of that program, or of the programs' merged workload.
        model: The model, whose parameters move into a host store; or the engine that holds it already.
        arena: Where gradients of a training step wait for their updates; None takes one of its own.
        merged: The programs, and maybe more, in the order in which their workloads were merged; None is that of first
            use.

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
        arena: GrowingArena | None = None,
        merged: Sequence[Program] | None = None,
    ):
        programs = [program] if isinstance(program, Program) else list(program)
        _check_fits(programs, schedule)
        engine = model if isinstance(model, Engine) else Engine(model, programs[0].device)
        self.schedule = schedule
        self.engine = engine
        self._loaded = Loaded.of_each(programs, merged, engine, schedule)
        if schedule.kind.is_training_step and arena is None:
            arena = GrowingArena(engine.bus)
        self._resumed: tuple[Instructions, int] | None = None
        loaded = serving(self._loaded, programs, schedule)
        self._operations = Operations(loaded, schedule, engine, schedule.instructions, arena)

    def in_order(self, programs: Sequence[Program]) -> Executor:
        """Returns an executor of the same schedule and programs, with the micro-batches in another order.

        Args:
            programs: One per micro-batch, of those for which the schedule was made.
        """
        found, own = copy(self), self._operations
        loaded = serving(self._loaded, programs, self.schedule)
        found._operations = Operations(loaded, self.schedule, self.engine, own.instructions, own.arena)
        return found

    @property
    def loaded(self) -> Loaded:
        """The program of the first micro-batch on the engine."""
        return self._operations.loaded[0]

    @property
    def program(self) -> Program:
        """That of the first micro-batch."""
        return self.loaded.program

    @property
    def facts(self) -> Facts:
        """Where gradients flow in it."""
        return self.loaded.facts

    @property
    def why_unrecorded(self) -> str:
        """Why kernels that the schedule has recorded are launched one by one after all; empty if they aren't."""
        recorded = self.schedule.recorded
        found = (each.runners[block].why_eager for each in self._operations.loaded for block in recorded)
        return next(filter(None, [*([self.engine.runners.why_unrecorded] if recorded else []), *found]), "")

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

    @property
    def places_there(self) -> Mapping[int, Bytes]:
        """The bytes of the arena of each block that the device updates, by the identity of its image."""
        there = self.schedule.device_updates
        loads = [one for one in self._operations.instructions.all if one.op.what == "W" and one.op.block in there]
        return {id(self.loaded.images[one.op.block]): one.state for one in loads if one.state is not None}

    @checked()
    def begin(
        self,
        inputs: Sequence[Sequence[torch.Tensor]],
        *,
        watch: Watch | None = None,
        file: ScratchFile | None = None,
    ) -> Run:
        """Takes the inputs of a training step.

        Args:
            inputs: Per micro-batch: the model's tensor inputs, in order, each where `program.values` has it.
            watch: Takes the time of each operation.
            file: Has parked values, if the schedule moves some on to a file.

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
        return self._operations.begin(starts, can_repeat=True, watch=watch, file=file)

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
        run = self._operations.begin([start])
        try:
            run.forward()
            (call,) = run.calls
            self.engine.give_slots(call)
            if commits:
                run.write_buffers()
            call.outputs = [self._output(call, ref.kind, ref.name) for ref in self.program.outputs]
            call.remember_versions(self.facts.watched)
            if commits and self.facts.differentiable_outputs:
                call.remember_bytes()
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
            check_late = call.check_bytes()
            running = call if call.status == OPEN else self._replay(start)
            if not keep_graph:
                call.spend(outputs, self.facts.differentiable_outputs)
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
        handed = set[str]()  # a backward that is repeated makes those again that came before
        attempts = Attempts("the backward", self.engine.device)
        while True:
            try:
                running = self._replay(start) if running is None else running
                found = self._run_backward(running, gradients, take, handed)
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
        self, call: Call, gradients: Sequence[torch.Tensor | None], take: Take | None, handed: set[str]
    ) -> list[torch.Tensor | None]:
        for ref, gradient in zip(self.program.outputs, gradients, strict=True):
            if gradient is not None:
                call.add_gradient(ref.name, gradient)
        self._operations.gradients.begin(take, handed)
        is_warm = self.engine.has_slots(call)
        self.engine.give_slots(None)
        warm = self._operations.instructions, self.schedule.device_bytes
        instructions, device_bytes = warm if is_warm else self._cold()
        self.engine.reserve_slots(instructions.slot_bytes, device_bytes, self._operations.runners)
        try:
            Run(self._operations, [call]).backward(instructions)
        finally:
            self._operations.gradients.end()
        return [call.gradients.get(self.program.inputs[i]) for i in self.facts.differentiable_inputs]

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

    def handed_through(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Puts the caller's own tensor where the model returns an input, and the model's where it returns its state.

        Args:
            inputs: Of a call.
            outputs: Of the call.
        """
        own = dict(zip(self.program.inputs, inputs, strict=True))
        if is_on_host(self.program.device):  # elsewhere a buffer that was written is a copy on the device
            own |= {name: self._state_output(key) for name, key in self.facts.returned_buffers.items()}
        pairs = zip(self.program.outputs, outputs, strict=True)
        return [
            self._state_output(ref.name) if ref.kind == "state" else own.get(ref.name, output) for ref, output in pairs
        ]

    def _output(self, call: Call, kind: str, name: str) -> torch.Tensor:
        return call.values[name].detach() if kind == "value" else self._state_output(name)

    def _state_output(self, key: str) -> torch.Tensor:
        """Returns a parameter or buffer that the model returns: the tensor itself where the device is the host."""
        if key not in self.engine.tensors:
            raise ExecuteError(
                f"the model has no parameter or buffer {shown(key)}.\n  Names are those of the model's state_dict.\n"
                f"  It has {shown(list(self.engine.tensors))}."
            )
        state, device = self.engine.tensors[key], self.engine.device.torch_device
        return state if state.device == device else state.to(device)


def _check_fits(programs: Sequence[Program], schedule: Schedule) -> None:
    """Checks that a schedule is one of these programs."""
    if len(programs) != schedule.kind.micro_batches:
        raise ExecuteError(
            f"the schedule has {counted(schedule.kind.micro_batches, 'micro-batch')}; programs: {len(programs)}.\n"
            "  Each micro-batch runs a program; several may run the same program.\n  Give one program per micro-batch."
        )
    for program in programs:
        if schedule.num_blocks != len(program.blocks):
            raise ExecuteError(
                f"the schedule has {counted(schedule.num_blocks, 'block')}, the program has {len(program.blocks)}.\n"
                "  A schedule runs the program that it was made for.\n  Give megatrain.schedule(program)."
            )


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
