"""Stopwatch: measures the time of each operation of a step."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatrain.device import Device
from megatrain.scheduler.effects import Stream
from megatrain.scheduler.instructions import Instruction
from megatrain.scheduler.table import Position


class Stopwatch:
    """Times each operation from when it could have begun, its stream free and its waits over, to its end.

    Time between operations thus belongs to the next operation, so a simulation of these times includes it.

    Args:
        device: Where all work but the host's runs.

    Attributes:
        seconds: By position.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.seconds: dict[Position, float] = {}
        self._ends: dict[Position, float] = {}
        self._last: dict[Stream, float] = {}
        self._begin: float | None = None

    def timed(self, instruction: Instruction, work: Callable[[], None]) -> Callable[[], None]:
        """Returns the work of an operation, with its time taken; on an accelerator its stream waits for the end."""
        begin = self._begin = time.perf_counter() if self._begin is None else self._begin

        def run() -> None:
            work()
            stream, queue = instruction.position.stream, self._device.current_stream()
            # Not the whole device: another stream's longer work would count as this one's.
            if stream != Stream.HOST and queue is not None:
                queue.synchronize()
            end = self._ends[instruction.position] = time.perf_counter()
            free = self._last.get(stream, begin)
            self._last[stream] = end
            self.seconds[instruction.position] = end - max([free, *(self._ends[w] for w in instruction.waits)])

        return run
