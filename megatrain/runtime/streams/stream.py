"""Lane and StreamThread: operations in order, each after the events it waits for."""

from __future__ import annotations

import contextlib
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

import torch

from megatrain.base.checks import checked, number, one_of, optional
from megatrain.device import Device, DeviceEvent, DeviceStream, is_late
from megatrain.runtime.streams.events import CALLER, Aborted, Event, Failure, Session, late_words, work_for

_PRINTED_FIRST = ("h2d", "compute", "d2h", "host")


class InjectedFailure(RuntimeError):
    """Raised by an operation that `Chaos.fail` names."""


@checked(max_delay_s=number(least=0, below=60, example=0.002), slow=optional(one_of(*_PRINTED_FIRST, "disk")))
@dataclass(frozen=True)
class Chaos:
    """Disturbs every stream, so that operations without a guaranteed order change places in a test.

    Delays come from a generator per stream, seeded with `seed` and the stream's name: what one stream draws
    does not depend on the others, and no global generator is touched.

    Args:
        seed: Seed of all delays.
        max_delay_s: Longest delay in seconds; every operation is delayed before and after its work.
        poison: Whether freed slots are to be filled with NaN; the owner of the slots reads it.
        slow: Name of the one stream to delay, always by `max_delay_s`; None delays all streams at random.
        fail: Operation that raises `InjectedFailure` in place of its work: `"d2h:G3"`, or `"G3"` on any
            stream. Not while a training step recovers from that very failure.
    """

    seed: int = 0
    max_delay_s: float = 0.002
    poison: bool = True
    slow: str | None = None
    fail: str | None = None

    def delay(self, stream: str) -> Callable[[], None] | None:
        """Returns what sleeps on `stream` for one random while, or None if that stream is left alone."""
        if self.max_delay_s <= 0 or self.slow not in (None, stream):
            return None
        if self.slow == stream:
            return lambda: time.sleep(self.max_delay_s)
        dice = random.Random(f"{self.seed}:{stream}")
        return lambda: time.sleep(dice.uniform(0, self.max_delay_s))

    def strikes(self, stream: str, label: str) -> bool:
        """Tells whether the operation `label` on `stream` is the one to fail."""
        return self.fail is not None and self.fail in (label, f"{stream}:{label}")


@dataclass(frozen=True, slots=True)
class Issued:
    """An operation that ran: its stream, its label, and the labels of the events it waited for."""

    stream: str
    label: str
    waits: tuple[str, ...]

    def __str__(self) -> str:
        waits = f" <- {', '.join(self.waits)}" if self.waits else ""
        return f"{self.label}{waits}"


class Recording:
    """The operations that ran: in order of issue per stream, and in order of completion over all.

    Operations dropped after a failure are not in it. Printing depends only on the order within each stream,
    which is fixed; `completed` depends on timing and is therefore not printed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._issued: list[Issued] = []
        self._completed: list[tuple[str, str]] = []

    def add_issued(self, stream: str, label: str, waits: tuple[str, ...]) -> None:
        """Notes that an operation starts, all it waited for being issued."""
        with self._lock:
            self._issued.append(Issued(stream, label, waits))

    def add_completed(self, stream: str, label: str) -> None:
        """Notes that an operation has ended (been issued, on an accelerator)."""
        with self._lock:
            self._completed.append((stream, label))

    @property
    def issued(self) -> tuple[Issued, ...]:
        """Operations in the order in which they started, over all streams."""
        with self._lock:
            return tuple(self._issued)

    @property
    def completed(self) -> tuple[tuple[str, str], ...]:
        """Stream and label of each operation, in the order in which they ended."""
        with self._lock:
            return tuple(self._completed)

    def on(self, stream: str) -> tuple[Issued, ...]:
        """Returns the operations of one stream, in order."""
        return tuple(op for op in self.issued if op.stream == stream)

    def labels(self, stream: str) -> tuple[str, ...]:
        """Returns the labels of one stream, in order."""
        return tuple(op.label for op in self.on(stream))

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._issued.clear()
            self._completed.clear()

    def __str__(self) -> str:
        seen = {op.stream for op in self.issued}
        known = [name for name in _PRINTED_FIRST if name in seen]
        names = known + sorted(seen.difference(known))
        return "\n".join(f"{name}: {'; '.join(map(str, self.on(name)))}" for name in names)


class Queued(NamedTuple):
    """A queued operation. Without work it is a marker: settled when reached, even after a failure."""

    step: Session
    label: str
    work: Callable[[], None] | None
    waits: Sequence[Event]
    done: Event


class Lane:
    """All that a thread needs to run a stream's operations, without the stream, which must stay collectable."""

    def __init__(self, name: str, device: Device, chaos: Chaos | None, recording: Recording | None) -> None:
        self.name = name
        self.device = device
        self._chaos = chaos
        self._recording = recording
        self._delay = None if chaos is None else chaos.delay(name)
        self.device_stream: DeviceStream | None = None
        self.is_entered = False

    def perform(self, op: Queued) -> None:
        """Runs one operation on this thread and settles its event; raises what went wrong after noting it."""
        try:
            self._run(op)
        except Aborted:
            op.done.settle(failed=True)
            raise
        except BaseException as error:
            place = f"{self.name}:{op.label}"
            if self.name == CALLER and is_late(error):
                error.add_note(late_words(place))
            op.step.abort(Failure(place, error, is_callers=self.name == CALLER))
            op.done.settle(failed=True)
            raise
        op.done.settle()

    def _run(self, op: Queued) -> None:
        step, label, work, waits, done = op
        if step.failure is not None:
            raise Aborted(label)
        for event in waits:
            step.wait(self.name, label, event)
            if event.mark is not None:
                self._wait_for_mark(event.mark, event.device)
        self._begins(op)
        assert work is not None
        work()
        if self.device_stream is not None:
            done.mark, done.device = self.device_stream.record_event(), self.device
        # Before others can see that it is done.
        if self._delay is not None:
            self._delay()
        if self._recording is not None:
            self._recording.add_completed(self.name, label)

    def _begins(self, op: Queued) -> None:
        """Disturbs and records an operation whose waits are over; no failure is injected into a recovery."""
        if self._delay is not None:
            self._delay()
        if self._recording is not None:
            self._recording.add_issued(self.name, op.label, tuple(event.label for event in op.waits))
        if self._chaos is not None and not op.step.is_recovery and self._chaos.strikes(self.name, op.label):
            raise InjectedFailure(f"chaos made {self.name}:{op.label} fail")

    def _wait_for_mark(self, mark: DeviceEvent, device: Device | None) -> None:
        if self.device_stream is None:
            # A stream of host work (an update that reads offloaded gradients) needs the bytes to be there.
            assert device is not None, "a mark is of a device"
            device.wait_for(mark)
        else:
            self.device_stream.wait_event(mark)

    def serve(self, op: Queued) -> None:
        """Runs one operation on the stream's own thread; its failure is noted in the step and ends here."""
        if op.work is None:
            op.done.settle()
            return
        work_for(op.step.turns)
        # No error of an operation, not even SystemExit, may end the thread that others rely on.
        with contextlib.suppress(BaseException):
            self.perform(op if self.is_entered else op._replace(work=self._entering(op.work)))

    def _entering(self, work: Callable[[], None]) -> Callable[[], None]:
        """Wraps the first work of a thread, so that a device that can't be entered fails that operation."""

        def enter() -> None:
            if self.device_stream is not None:
                self.device.enter(self.device_stream)
            self.is_entered = True
            work()

        return enter


def _serve(lane: Lane, queue: SimpleQueue[Queued | None], ready: threading.Event) -> None:
    """Body of a stream's thread; ends at None."""
    torch.set_grad_enabled(False)
    # A second team of OpenMP threads would fight with compute's for the same cores, spinning at its barriers.
    torch.set_num_threads(1)
    ready.set()
    while (op := queue.get()) is not None:
        lane.serve(op)
        # While this thread sleeps in get(), it must not keep alive what the last operation used.
        del op


class StreamThread:
    """A queue of operations run in order by a thread of its own, started with the first one.

    The thread ends at `close()`, or when the stream is garbage collected. All operations are put in by one thread at a
    time.
    """

    def __init__(
        self, name: str, device: Device, chaos: Chaos | None = None, recording: Recording | None = None
    ) -> None:
        self.name = name
        self._lane = Lane(name, device, chaos, recording)
        self._lane.device_stream = device.new_stream()
        self._queue: SimpleQueue[Queued | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], object] | None = None
        self.is_idle = True

    @property
    def device_stream(self) -> DeviceStream | None:
        """The device's stream; None where it has none."""
        return self._lane.device_stream

    def put(self, op: Queued) -> None:
        """Queues an operation, whose work runs on this stream's thread, without gradients; returns at once."""
        self.is_idle = False
        op.done.stream = self.name
        self._queue.put(op)
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        # The finalizer holds the queue, the thread holds lane and queue; neither holds the stream.
        finalizer = weakref.finalize(self, self._queue.put, None)
        name = f"megatrain-{self.name}"
        ready = threading.Event()
        thread = threading.Thread(target=_serve, args=(self._lane, self._queue, ready), name=name, daemon=True)
        num_threads = torch.get_num_threads()
        thread.start()
        ready.wait()
        # torch counts threads per thread, but remembers the number last set as the default of threads to come.
        torch.set_num_threads(num_threads)
        self._thread, self._stop = thread, finalizer

    def drain(self, step: Session) -> None:
        """Waits until all that was put in is over (issued, on an accelerator). Raises no failure of it."""
        if not self.is_idle:
            end = Event(f"end of {self.name}")
            self.put(Queued(step, end.label, None, (), end))
            step.wait(CALLER, "finish", end, patient=True)
            self.is_idle = True

    def close(self, step: Session) -> None:
        """Waits until what is queued is over, then ends the thread. A later operation starts another."""
        self.drain(step)
        if self._thread is not None and self._stop is not None:
            self._stop()
            if self._thread is not threading.current_thread():
                self._thread.join()
            self._thread = self._stop = None
            # The next thread has to enter the device as well.
            self._lane.is_entered = False
