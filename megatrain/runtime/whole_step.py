"""StepExecutor: runs the schedule of a whole training step, all micro-batches and the updates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from megatrain.device import Device
from megatrain.passes.program import Program
from megatrain.runtime.call import DONE, FAILED, Call
from megatrain.runtime.engine import Engine
from megatrain.runtime.gradients import GradientSink
from megatrain.runtime.landing import Landing, LandingArena
from megatrain.runtime.loaded import Loaded
from megatrain.runtime.operations import Operations, Trainer
from megatrain.runtime.rng import OwnGenerators, micro_batch_seed
from megatrain.runtime.slots import Slots
from megatrain.runtime.start import Start
from megatrain.runtime.stopwatch import Stopwatch
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.table import Position


class StepExecutor:
    """Runs whole steps of one schedule, each as a `StepRun`.

    Args:
        programs: One per micro-batch, of the same structure: captures for inputs of other sizes.
        schedule: A checked schedule of a whole step for their merged workload.
        engine: Holds the model.
        arena: Where gradients wait for their updates.
    """

    def __init__(self, programs: Sequence[Program], schedule: Schedule, engine: Engine, arena: LandingArena):
        assert len(programs) == schedule.kind.micro_batches
        self.schedule = schedule
        self.engine = engine
        by_program = {id(p): Loaded.of(p, engine, is_training=True) for p in programs}
        self.loaded = [by_program[id(p)] for p in programs]
        self.slots = Slots(self.loaded[0].images, engine)
        self.instructions = schedule.instructions
        landing = Landing(self.instructions.landing_bytes, self.loaded[0], arena)
        self.sink = GradientSink.of(self.loaded[0], engine, landing=landing)
        self.operations = Operations(self.instructions, self.slots, engine, self.sink)

    @property
    def trained(self) -> Sequence[Sequence[str]]:
        """Keys of the parameters whose gradient is whole with each block's."""
        facts = self.loaded[0].facts
        known = set(facts.trained)
        return [[key for key in keys if key in known] for keys in facts.completes]

    def begin(self, inputs: Sequence[Sequence[torch.Tensor]], *, watch: Stopwatch | None = None) -> StepRun:
        """Takes the inputs of a step.

        Args:
            inputs: Per micro-batch: the model's tensor inputs on the compute device, in order.
            watch: Takes the time of each operation.
        """
        return StepRun(self, inputs, watch)


class StepRun:
    """One step under way. After a failure it can go on, or be dropped.

    Nothing outlives it but what the trainer does: buffers are written by `commit` at the end.
    """

    def __init__(
        self,
        executor: StepExecutor,
        inputs: Sequence[Sequence[torch.Tensor]],
        watch: Stopwatch | None = None,
    ):
        self._executor = executor
        self._watch = watch
        self._done: set[Position] = set()
        engine = executor.engine
        engine.refresh()
        self._calls: list[Call] = []
        for number, (loaded, tensors) in enumerate(zip(executor.loaded, inputs, strict=True)):
            start = Start.of(loaded.program, tensors, engine.tensors, executor.slots.places, engine.device)
            is_own = number > 0 and start.rng is not None
            generators = OwnGenerators(micro_batch_seed(number, engine.device), engine.device) if is_own else None
            parks = engine.parks.take(executor.instructions.park_bytes)
            call = Call(engine.meter, parks, start, loaded, generators=generators, can_repeat=True)
            self._calls.append(call)

    @property
    def device(self) -> Device:
        """The compute device."""
        return self._executor.engine.device

    def go(self, trainer: Trainer) -> None:
        """Runs the step.

        Raises:
            ExecuteError: If an operation on a stream's own thread fails. What compute raises passes unchanged.
        """
        executor, engine = self._executor, self._executor.engine
        engine.arena.ensure(executor.instructions.slot_bytes)
        engine.meter.set_arena(engine.arena.nbytes)
        engine.give_slots(None)
        for number, call in enumerate(self._calls):
            call.begin(engine.device, is_first=number == 0)
        for call, later in pairwise(self._calls):
            call.pass_on(call.loaded.program.inputs, later)
        executor.sink.begin(trainer.receive)
        self._run(trainer)

    def complete(self, trainer: Trainer) -> None:
        """Runs what a failure left of the step, but for the work of the host: the trainer does that itself.

        Raises:
            ExecuteError: See `go`.
        """
        instructions = self._executor.instructions.all
        host = (instruction.position for instruction in instructions if instruction.op.stream == "host")
        self._done.update(host)
        self._executor.sink.stop_reuse()
        self._run(trainer, is_recovery=True)

    def _run(self, trainer: Trainer, *, is_recovery: bool = False) -> None:
        self._executor.operations.run(
            self._calls,
            self._executor.instructions.backward,
            trainer=trainer,
            done=self._done,
            is_recovery=is_recovery,
            watch=self._watch,
        )

    @torch.no_grad()
    def commit(self) -> None:
        """Writes the buffers as the last micro-batch left them, and ends the step."""
        last = self._calls[-1]
        for key, name in last.loaded.program.commits:
            self._executor.engine.tensors[key].copy_(last.values[name])
        self.close(DONE)

    def close(self, status: str = FAILED) -> None:
        """Ends the step and gives back all that it held."""
        for call in self._calls:
            call.close(status)
