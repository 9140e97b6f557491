"""Run: the instructions of a schedule under way, of one call or of all micro-batches of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from megatrain.device import Device
from megatrain.runtime.call import DONE, FAILED, Call
from megatrain.runtime.call_start import Start
from megatrain.runtime.drawing.micro_batch_generators import MicroBatchGenerators
from megatrain.runtime.operations import Operations
from megatrain.runtime.streams.stopwatch import Watch
from megatrain.runtime.taken import StepTrainer
from megatrain.scheduler.instructions import Half
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
        self._operations.sink.begin(trainer.receive)
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
