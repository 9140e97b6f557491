"""Event and Step: how operations on different threads wait for each other, and how a failure frees all."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

from megatrain.base.interrupts import Interrupts
from megatrain.base.torch_private import current_graph_task
from megatrain.device import Device, DeviceEvent, HostMoment, Moment, is_late
from megatrain.errors import ExecuteError
from megatrain.scheduler.instructions import Instruction
from megatrain.scheduler.items import Stream
from megatrain.scheduler.table import Position


class _Here(threading.local):
    """What this thread does."""

    turns: tuple[Turn, ...] = ()


_HERE = _Here()
# A thread that waits for a turn checks for Ctrl-C at this interval, in seconds.
_POLL_S = 0.1


def turns_here() -> tuple[Turn, ...]:
    """Returns the turns that this thread has, or works for."""
    return _HERE.turns


def work_for(turns: tuple[Turn, ...]) -> None:
    """Notes for whose run this thread, a stream's, works from now on."""
    _HERE.turns = turns


class Turn:
    """The right to use a model, for one thread at a time. Others wait.

    Code that a run calls (a hook on a gradient, the loss) must not wait for the end of that run: hooks run on threads
    of the streams, and the run waits for them. Such code is refused. So is a forked process, which has none of these
    threads.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._is_running = False
        self._differentiates = False
        self._process = os.getpid()

    def run(
        self, what: str = "the model", *, in_child: bool = False, differentiates: bool = False
    ) -> AbstractContextManager[None]:
        """As `hold`, for the operations of a call or a step: what they call may not use the model.

        Args:
            differentiates: They use autograd's engine, whose threads may run hooks as well.
        """
        return self.hold(what, in_child=in_child, is_running=True, differentiates=differentiates)

    @contextmanager
    def hold(
        self, what: str, *, in_child: bool = False, is_running: bool = False, differentiates: bool = False
    ) -> Generator[None]:
        """Keeps other threads away; the same thread may hold it several times over, but not within `run`.

        Args:
            in_child: It needs no other thread, so that a forked process may do it, too.

        Raises:
            ExecuteError: If it is called from within a run, or in a forked process.
        """
        self._check(what, in_child=in_child)
        # Ctrl-C between the lock and what is noted of it would keep the turn for ever.
        with Interrupts() as interrupts:
            self._acquire(what, interrupts)
            before = self._owner, _HERE.turns
            try:
                self._owner, _HERE.turns = threading.get_ident(), (*_HERE.turns, self)
                self._is_running, self._differentiates = is_running, differentiates
                with interrupts.released():
                    yield
            finally:
                self._owner, _HERE.turns = before
                self._is_running = self._differentiates = False  # nothing is taken within a run
                self._lock.release()

    def _acquire(self, what: str, interrupts: Interrupts) -> None:
        is_child = os.getpid() != self._process
        while not self._lock.acquire(timeout=0 if is_child else _POLL_S):
            if is_child:
                raise ExecuteError(_FORKED.format(what=what))  # a thread of the parent has it, for ever
            interrupts.check()

    def _check(self, what: str, *, in_child: bool) -> None:
        if os.getpid() != self._process and not in_child:
            raise ExecuteError(_FORKED.format(what=what))
        is_owner = self._owner == threading.get_ident()
        works_for_it = self in _HERE.turns or (self._differentiates and _is_autograd())
        if self._is_running if is_owner else works_for_it:
            it = "it" if what == "the model" else "the model"
            raise ExecuteError(_RUNNING.format(what=what, it=it))


def _is_autograd() -> bool:
    """Whether this is a thread of autograd's engine, which no code of Python has started."""
    is_foreign = isinstance(threading.current_thread(), threading._DummyThread)  # pyright: ignore
    return is_foreign and current_graph_task() != -1


_RUNNING = (
    "{what} was called while {it} runs.\n"
    "  A run waits for hooks on gradients, the loss, and who takes weights(), so these can't wait for its end.\n"
    "  Call it after the run has returned, or weights() has yielded the last tensor."
)
_FORKED = (
    "{what} was called in a forked process.\n"
    "  The threads that run the model stayed in the process that compiled it.\n"
    "  Read parameters and state, or call the model itself, uncompiled; or compile it in this process."
)


CALLER = "compute"
"""Name under which the caller's thread waits: it runs the compute stream and submits to all the others."""

# A gate lets one thread sleep until somebody puts something in. SimpleQueue and not threading.Event: it is a
# few times cheaper, may be signalled twice, and its put() is safe inside finalizers.
Gate = SimpleQueue[None]


class Aborted(Exception):
    """An operation did not run because another one of its step had failed. Never reaches the user."""


class Event:
    """Tells that an operation is done, across threads and streams.

    On the CPU, `host_done` means that the work is complete. On an accelerator it means *issued*: `mark` is
    then the event of the device recorded after the work, and a stream that waits for this event waits for that
    mark as well; `device` knows how the host does. An event belongs to one operation of one step and is settled exactly
    once, by that operation.
    """

    __slots__ = ("_gates", "_lock", "device", "has_failed", "host_done", "label", "mark", "stream")

    def __init__(self, label: str = "") -> None:
        self.label = label
        self.stream: str | None = None
        self.mark: DeviceEvent | None = None
        self.device: Device | None = None
        self.host_done = False
        self.has_failed = False
        self._lock = threading.Lock()
        self._gates: list[Gate] | None = None

    def settle(self, *, failed: bool = False) -> None:
        """Wakes all waiting threads; `failed` says that it failed, or was dropped because another operation did."""
        with self._lock:
            self.has_failed = failed
            self.host_done = True
            gates, self._gates = self._gates, None
        for gate in gates or ():
            gate.put(None)

    def attach(self, gate: Gate) -> None:
        """Has `gate` opened as soon as the operation is done, at once if it is."""
        with self._lock:
            if not self.host_done:
                self._gates = [*(self._gates or ()), gate]
                return
        gate.put(None)

    def check(self) -> None:
        """Raises `Aborted` if the operation failed or was dropped."""
        if self.has_failed:
            raise Aborted(self.label)

    def __repr__(self) -> str:
        state = "failed" if self.has_failed else "done" if self.host_done else "pending"
        return f"Event({self.label}, {state})"


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of a step.

    Args:
        label: Operation that failed, `d2h:G3`; None if it happened between operations.
        error: The error that it raised.
        is_callers: It was raised on the thread that submits, where it surfaces by itself, unharmed.
    """

    label: str | None
    error: BaseException
    is_callers: bool

    def surface(self) -> BaseException:
        """Returns the error for the caller."""
        if self.is_callers:
            return self.error
        reason = f"{type(self.error).__name__}: {self.error}".rstrip(": ")
        late = "" if not is_late(self.error) else f"\n{late_words(self.label)}"
        error = ExecuteError(f"{self.label} failed: {reason}{late}")
        error.__cause__ = self.error
        return error


def late_words(label: str | None) -> str:
    """Says of a device's own error that the op at which it was raised may not be the one that failed."""
    return (
        f"  A device reports its errors later: what failed is {label or 'this'}, or an op issued before.\n"
        "  Often a kernel got an index beyond its table (a token, a label); the device then runs no more work of this "
        "process.\n"
        '  Start again with device="cpu", or with CUDA_LAUNCH_BLOCKING=1 on CUDA: then the op itself raises the error.'
    )


class Session:
    """The shared state of the operations between one `begin` and its `finish`: sleeping threads, the first failure.

    A wait that can never end is found, not suffered: all operations are submitted by one thread, so while
    that thread sleeps, the chain "who sleeps, for which event, on which stream" either leads to a stream at
    work or proves that nothing will come.
    """

    __slots__ = ("_asleep", "_lock", "failure", "is_recovery", "turns")

    def __init__(self, *, is_recovery: bool = False) -> None:
        self.failure: Failure | None = None
        self.is_recovery = is_recovery
        self.turns = turns_here()  # of the caller, for whom the streams work
        self._lock = threading.Lock()
        self._asleep: dict[str, tuple[str, Event, Gate]] = {}

    def abort(self, failure: Failure) -> None:
        """Keeps `failure` if it is the first and wakes all who wait."""
        with self._lock:
            self._abort(failure)

    def _abort(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure
        for _, _, gate in self._asleep.values():
            gate.put(None)

    def wait(self, stream: str, label: str, event: Event, *, patient: bool = False) -> None:
        """Blocks the thread that serves `stream` until `event` is done on the host.

        Args:
            stream: Stream whose next operation waits, `CALLER` for the caller's thread.
            patient: Keeps waiting although the step is aborted; only for events that are settled regardless.

        Raises:
            Aborted: If the step failed, or the operation that `event` tells of did.
        """
        if not event.host_done:
            gate: Gate = SimpleQueue()
            event.attach(gate)
            try:
                with self._lock:
                    self._asleep[stream] = (label, event, gate)
                    self._find_deadlock()
                while not event.host_done:
                    if self.failure is not None and not patient:
                        raise Aborted(label)
                    gate.get()
            finally:
                with self._lock:
                    self._asleep.pop(stream, None)
        event.check()

    def _find_deadlock(self) -> None:
        """Aborts the step if the caller's thread sleeps and nobody at work can ever wake it."""
        stream, seen = CALLER, set[str]()
        while stream in self._asleep and stream not in seen:
            seen.add(stream)
            label, event, _ = self._asleep[stream]
            if event.host_done:
                return
            if event.stream is None or event.stream in seen:
                text = f"{stream}:{label} waits for {event.label}, which no operation submitted can ever finish"
                self._abort(Failure(f"{stream}:{label}", ExecuteError(text), is_callers=True))
                return
            stream = event.stream


_OF_DEVICE = (Stream.H2D, Stream.COMPUTE, Stream.D2H)


class Stopwatch:
    """Times each operation from when it could have begun, its stream free and its waits over, to its end.

    Time between operations thus belongs to the next operation, so a simulation of these times includes it. But in a
    step that nothing holds up, Python launches an operation while the device still runs the one before: an operation
    takes as long as Python needs from when it could have begun, or as the device needs once it is launched, whichever
    is longer.
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
