"""VirtualHosts: training steps of the real runtime in virtual time, with the threads and the work of the host in it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import megatrain
from megatrain.runtime.operations import HANDLERS
from megatrain.runtime.streams import events as stopwatch
from megatrain.runtime.streams.events import Event, Session
from megatrain.runtime.streams.stream import Lane, StreamThread
from megatrain.scheduler.items import Effect, Stream
from megatrain.scheduler.lifetimes import Books
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.simulate import Measured
from megatrain.scheduler.table import Position
from tests.simulated_device.simulator import Simulator


class VirtualHosts:
    """Clocks of megatrain's threads: who waits for another thread goes on no earlier than the other was done.

    The device's own clocks are the simulator's, whose `set_profile` comes first.

    Args:
        simulator: The simulated device.
        host_bytes_per_s: Rate of updates and norms, in bytes of host memory read and written; the processor's own time
            doesn't count.
        op_s: Seconds of Python for each op of compute and of the host, besides what it launches.
        update_s: Seconds of an update for each parameter, besides its bytes. Copies don't slow updates down here.
    """

    def __init__(self, simulator: Simulator, host_bytes_per_s: float, op_s: float = 0.0, update_s: float = 0.0):
        self._simulator = simulator
        self._rate = host_bytes_per_s
        self._op_s, self._update_s = op_s, update_s
        self._known: dict[Event, float] = {}
        self._effects: Mapping[Position, Effect] = {}
        self._letters: Mapping[Position, str] = {}

    def take(self, step: megatrain.TrainStep, batch: Any) -> float:
        """Takes a training step, between two moments at which the device is idle; returns its virtual seconds."""
        self._read(step.prepare(batch))
        with self._handing_on():
            begin = self._idle()
            step(batch)
            return self._idle() - begin

    def predicted(self, step: megatrain.TrainStep, batch: Any) -> float:
        """Takes a training step as `TrainStep.measure` does; returns what the simulator of schedules makes of that."""
        return step.schedule.simulate(self.measured(step, batch)).step_s

    def measured(self, step: megatrain.TrainStep, batch: Any) -> Measured:
        """Takes a training step as `TrainStep.measure` does."""
        self._read(step.prepare(batch))
        with self._handing_on():
            self._idle()
            return step.measure(batch)

    def moved_bytes(self, stream: Stream, what: str | None = None) -> int:
        """Bytes that the ops of a stream, or those of one letter, moved in the latest step."""
        effects = ((self._letters[p], effect) for p, effect in self._effects.items() if p.stream == stream)
        return sum(effect.moves for letter, effect in effects if what in (None, letter))

    def _read(self, schedule: Schedule) -> None:
        self._effects = dict(Books(schedule).ops)
        self._letters = {position: op.what for position, op in schedule.positions()}

    def _idle(self) -> float:
        torch.accelerator.synchronize()
        return self._simulator.host_clock

    def _at_least(self, seconds: float) -> None:
        self._simulator.host_clock = max(self._simulator.host_clock, seconds)

    @contextmanager
    def _handing_on(self) -> Generator[None]:
        """During the body, each place where threads meet hands a clock on."""
        with ExitStack() as stack:

            def replaced(owner: Any, name: str, made: Callable[[Any], Any]) -> None:
                stack.enter_context(patch.object(owner, name, made(getattr(owner, name))))

            replaced(StreamThread, "put", self._submitting)
            replaced(Lane, "perform", self._performing)
            replaced(Event, "settle", self._settling)
            replaced(Session, "wait", self._waiting)
            clock = SimpleNamespace(perf_counter=lambda: self._simulator.host_clock)
            stack.enter_context(patch.object(stopwatch, "time", clock))
            timed = {key: self._timed(HANDLERS[key]) for key in HANDLERS if key[0] == Stream.HOST}
            stack.enter_context(patch.dict(HANDLERS, timed))
            try:
                yield
            finally:
                self._known.clear()

    def _submitting(self, original: Any) -> Any:
        def put(stream: StreamThread, op: Any) -> None:
            self._known[op.done] = self._simulator.host_clock
            original(stream, op)

        return put

    def _performing(self, original: Any) -> Any:
        def perform(lane: Lane, op: Any) -> None:
            self._at_least(self._known.get(op.done, 0))
            if lane.name in (Stream.COMPUTE, Stream.HOST):
                self._simulator.host_clock += self._op_s
            original(lane, op)

        return perform

    def _settling(self, original: Any) -> Any:
        def settle(event: Event, *, failed: bool = False) -> None:
            self._known[event] = self._simulator.host_clock
            original(event, failed=failed)

        return settle

    def _waiting(self, original: Any) -> Any:
        def wait(session: Session, stream: str, label: str, event: Event, **options: Any) -> None:
            original(session, stream, label, event, **options)
            self._at_least(self._known.get(event, 0))

        return wait

    def _timed(self, original: Any) -> Any:
        def run(operations: Any, taken: Any, instruction: Any) -> None:
            original(operations, taken, instruction)
            effect = self._effects[instruction.position]
            self._simulator.host_clock += effect.moves / self._rate + effect.num_parameters * self._update_s

        return run
