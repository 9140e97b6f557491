"""Watches: measure the time of each operation of a step, with its streams held up after each or as it runs ever."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatrain.device import Device, HostMoment, Moment
from megatrain.errors import ExecuteError
from megatrain.scheduler.instructions import Instruction
from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Position

_OF_DEVICE = (Stream.H2D, Stream.COMPUTE, Stream.D2H, Stream.RECEIVE, Stream.SEND)


class Stopwatch:
    """Times each operation from when it could have begun, its stream free and its waits over, to its end.

    Time between operations thus belongs to the next operation, so a simulation of these times includes it. But in a
    step that nothing holds up, Python launches an operation while the device still runs the one before: an operation
    takes as long as Python needs from when it could have begun, or as the device needs once it is launched, whichever
    is longer.

    Args:
        device: Where all work but the host's runs.

    Attributes:
        seconds: By position.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Forgets all times."""
        self.seconds: dict[Position, float] = {}
        self._ends: dict[Position, float] = {}
        self._last: dict[Stream, float] = {}
        self._begin: float | None = None

    def timed(self, instruction: Instruction, work: Callable[[], None]) -> Callable[[], None]:
        """Returns the work of an operation, with its time taken; on an accelerator its stream waits for the end."""
        begin = self._begin = time.perf_counter() if self._begin is None else self._begin

        def run() -> None:
            launching = time.perf_counter()
            work()
            launched = time.perf_counter()
            stream, queue = instruction.position.stream, self._device.current_stream()
            # Not the whole device: another stream's longer work would count as this one's.
            if stream != Stream.HOST and queue is not None:
                queue.synchronize()
            end = self._ends[instruction.position] = time.perf_counter()
            free = self._last.get(stream, begin)
            self._last[stream] = end
            ready = max([free, *(self._ends[w] for w in instruction.waits)])
            self.seconds[instruction.position] = max(launched - ready, end - max(ready, launching))

        return run


class RunClock:
    """Takes the moments at which each operation begins and ends, and holds nothing up.

    Work of the host is timed by its clock, work of an accelerator by events of its streams. The two clocks are set
    once, when the step begins and the device is idle; they may drift apart by some microseconds a second.

    Args:
        device: Where all work but the host's runs.

    Raises:
        ExecuteError: If the device's events don't measure time.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.restart()
        try:
            self._zero()
        except (RuntimeError, AttributeError, TypeError) as error:
            raise ExecuteError(
                f"events of {device} don't measure time: {error}\n"
                "  A step is timed as it runs by events of its streams.\n"
                "  Use step.measure(batch), whose streams wait after each operation."
            ) from error

    def restart(self) -> None:
        """Forgets all times."""
        self._moments: dict[Position, tuple[Moment, Moment]] = {}
        # The same moment by both clocks.
        self._zeros: tuple[Moment, HostMoment] | None = None

    def timed(self, instruction: Instruction, work: Callable[[], None]) -> Callable[[], None]:
        """Returns the work of an operation, with the moments taken at which it begins and ends."""
        if self._zeros is None:
            self._zeros = self._zero(), HostMoment(time.perf_counter())
        is_device = instruction.position.stream in _OF_DEVICE

        def run() -> None:
            begin = self._moment(is_device)
            work()
            self._moments[instruction.position] = begin, self._moment(is_device)

        return run

    def spans(self) -> dict[Position, tuple[float, float]]:
        """Seconds of the beginning and the end of each operation, from the start of the step; waits for the device."""
        return {position: (self._seconds(a), self._seconds(b)) for position, (a, b) in self._moments.items()}

    @property
    def zero_s(self) -> float:
        """The start of the step by `time.perf_counter`, which all processes of a host share; after the step."""
        assert self._zeros is not None
        return self._zeros[1].seconds

    def _zero(self) -> Moment:
        moment = self._device.moment()
        moment.seconds_since(moment)  # waits
        return moment

    def _moment(self, is_device: bool) -> Moment:
        return self._device.moment() if is_device else HostMoment(time.perf_counter())

    def _seconds(self, moment: Moment) -> float:
        assert self._zeros is not None
        of_device, of_host = self._zeros
        return moment.seconds_since(of_host if isinstance(moment, HostMoment) else of_device)


Watch = Stopwatch | RunClock
