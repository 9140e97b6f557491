"""Event and Step: how operations on different threads wait for each other, and how a failure frees all."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from queue import SimpleQueue

from megatrain.device import Device, DeviceEvent, is_late
from megatrain.errors import ExecuteError
from megatrain.runtime.streams.turn import turns_here

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
    then the event of the device recorded behind the work, and a stream that waits for this event waits for that
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
            label: That operation.
            event: The event that it waits for.
            patient: Keeps waiting although the step is aborted; only for events that are settled regardless.

        Raises:
            Aborted: If the step failed, or the operation behind `event` did.
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
