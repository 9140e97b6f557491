"""Streams: queues of operations, each served by its own thread, that wait for each other's events.

On an accelerator a stream also owns a `torch.Stream`: its thread issues work there, and waiting for an event means
waiting until it is issued, then having the `torch.Stream` wait for its mark. On the CPU the same threads do the
work itself. Compute is the exception: it runs on the caller's thread, so that autocast, grad mode, profilers and
tracebacks behave as they do without megatrain.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import NamedTuple

import torch

from megatrain.errors import ExecuteError
from megatrain.runtime.chaos import Chaos, InjectedFailure, Issued, Probe, Recording
from megatrain.runtime.events import CALLER, Aborted, Event, Failure, Step

__all__ = [
    "Aborted",
    "Chaos",
    "ComputeStream",
    "Event",
    "Failure",
    "InjectedFailure",
    "Issued",
    "Recording",
    "Stream",
    "StreamSet",
]


class _Op(NamedTuple):
    """A queued operation. Without work it is a marker: it is settled when reached, whatever happened before."""

    step: Step
    label: str
    work: Callable[[], None] | None
    waits: Sequence[Event]
    done: Event


class _Steps:
    """The current step of a set of streams; shared so that streams need not know their owner."""

    __slots__ = ("current",)

    def __init__(self) -> None:
        self.current = Step()


class _Lane:
    """What a thread needs in order to run a stream's operations: all but the stream, which it must not keep alive."""

    def __init__(self, name: str, device: torch.device, probe: Probe | None) -> None:
        self.name = name
        self.device = device
        self.probe = probe
        self.torch_stream: torch.Stream | None = None
        self.is_entered = False

    def perform(self, op: _Op) -> None:
        """Runs one operation on this thread and settles its event; raises what went wrong after noting it."""
        step, label, work, waits, done = op
        try:
            if step.failure is not None:
                raise Aborted(label)
            for event in waits:
                step.wait(self.name, label, event)
                if event.mark is not None:
                    self._wait_for_mark(event.mark)
            if self.probe is not None:
                self.probe.before(label, tuple(event.label for event in waits))
            assert work is not None
            work()
            if self.torch_stream is not None:
                done.mark = self.torch_stream.record_event()
            if self.probe is not None:
                self.probe.after(label)
        except Aborted:
            done.settle(failed=True)
            raise
        except BaseException as error:
            step.abort(Failure(f"{self.name}:{label}", error, is_callers=self.name == CALLER))
            done.settle(failed=True)
            raise
        done.settle()

    def _wait_for_mark(self, mark: torch.Event) -> None:
        if self.torch_stream is None:
            # A stream of host work (an update that reads offloaded gradients) needs the bytes to be there.
            mark.synchronize()
        else:
            self.torch_stream.wait_event(mark)

    def serve(self, op: _Op) -> None:
        """Runs one operation on the stream's own thread; failures have been noted in the step and end here."""
        if op.work is None:
            op.done.settle()
            return
        # Whatever an operation raises, SystemExit included, must not end the thread that others rely on.
        with contextlib.suppress(BaseException):
            self.perform(op if self.is_entered else op._replace(work=self._entering(op.work)))

    def _entering(self, work: Callable[[], None]) -> Callable[[], None]:
        """Wraps the first work of a thread, so that a device that can't be entered fails that operation."""

        def enter() -> None:
            if self.torch_stream is not None:
                torch.accelerator.set_stream(self.torch_stream)
            self.is_entered = True
            work()

        return enter


def _serve(lane: _Lane, queue: SimpleQueue[_Op | None]) -> None:
    """Body of a stream's thread; ends at None."""
    torch.set_grad_enabled(False)
    while (op := queue.get()) is not None:
        lane.serve(op)
        # While this thread sleeps in get(), it must not keep alive what the last operation used.
        del op


class Stream:
    """A queue of operations run in order by a thread of its own, started at the first `submit`.

    The thread ends at `close()`, or when the stream is garbage collected. All operations are submitted by one
    thread at a time.

    Args:
        name: Name in messages and recordings, such as `h2d`.
        device: Where its work runs: an accelerator (the stream then owns a `torch.Stream`) or the CPU.
        chaos: Disturbance, for tests.
        recording: Log of what ran, for tests.
        steps: The steps it shares with other streams; `StreamSet` passes it.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        chaos: Chaos | None = None,
        recording: Recording | None = None,
        steps: _Steps | None = None,
    ) -> None:
        self.name = name
        self._steps = _Steps() if steps is None else steps
        self._lane = _Lane(name, device, _probe(name, chaos, recording))
        if device.type != "cpu":
            self._lane.torch_stream = torch.Stream(device=device)
        self._queue: SimpleQueue[_Op | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], object] | None = None
        self._is_closed = False
        self.is_idle = True

    @property
    def torch_stream(self) -> torch.Stream | None:
        """The accelerator's stream; None on the CPU."""
        return self._lane.torch_stream

    def submit(self, label: str, work: Callable[[], None], waits: Sequence[Event], done: Event) -> None:
        """Queues an operation; returns at once.

        Args:
            label: The operation, for messages and recordings.
            work: Called on this stream's thread, without gradients, in the context of the `torch.Stream`.
            waits: Events that must be done before it runs.
            done: Settled when it is over: run, failed, or dropped because its step was aborted.
        """
        if self._is_closed:
            raise ExecuteError(f"{self.name}:{label} can't run: the stream is closed")
        done.stream = self.name
        self.is_idle = False
        self._queue.put(_Op(self._steps.current, label, work, waits, done))
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        # The finalizer holds the queue, the thread holds lane and queue; neither holds the stream.
        finalizer = weakref.finalize(self, self._queue.put, None)
        name = f"megatrain-{self.name}"
        thread = threading.Thread(target=_serve, args=(self._lane, self._queue), name=name, daemon=True)
        thread.start()
        self._thread, self._stop = thread, finalizer

    def mark(self) -> Event:
        """Queues a marker, settled once all that was submitted before is over, failed or not."""
        done = Event(f"end of {self.name}")
        done.stream = self.name
        self._queue.put(_Op(self._steps.current, done.label, None, (), done))
        return done

    def drain(self) -> None:
        """Waits until all that was submitted is over (issued, on an accelerator). Raises no failure of it."""
        if not self.is_idle:
            self._steps.current.wait(CALLER, "finish", self.mark(), patient=True)
            self.is_idle = True

    def close(self) -> None:
        """Runs what is queued, then ends the thread and waits for it. A closed stream takes no operations."""
        self._is_closed = True
        self.drain()
        if self._thread is not None and self._stop is not None:
            self._stop()
            if self._thread is not threading.current_thread():
                self._thread.join()
            self._thread = None


class ComputeStream:
    """The compute stream: operations run at once, on the caller's thread and the device's current `torch.Stream`.

    Args:
        device: Where compute runs.
        chaos: Disturbance, for tests.
        recording: Log of what ran, for tests.
        steps: The steps it shares with other streams; `StreamSet` passes it.
    """

    name = CALLER

    def __init__(
        self,
        device: torch.device,
        *,
        chaos: Chaos | None = None,
        recording: Recording | None = None,
        steps: _Steps | None = None,
    ) -> None:
        self._steps = _Steps() if steps is None else steps
        self._device = device
        self._probe = _probe(self.name, chaos, recording)

    def run(self, label: str, work: Callable[[], None], waits: Sequence[Event], done: Event) -> None:
        """Waits for `waits`, runs `work`, settles `done`.

        Raises:
            Aborted: If the step has failed; `StreamSet.finish` then raises the failure.
            BaseException: What `work` raises, unharmed, after aborting the step.
        """
        # A new lane each time: the device's current stream is the caller's to change.
        lane = _Lane(self.name, self._device, self._probe)
        if self._device.type != "cpu":
            lane.torch_stream = torch.accelerator.current_stream(self._device)
        done.stream = self.name
        lane.perform(_Op(self._steps.current, label, work, waits, done))


class StreamSet:
    """The streams of one engine, and the failures they share.

    Use `with streams.step():` around the submissions of one step, or `begin()`, `abort()` and `finish()`. After a
    failure of any kind the set can be used for the next step.

    Args:
        device: Where compute runs; transfers get their own `torch.Stream`s there if it is an accelerator.
        chaos: Disturbance of all streams, for tests.
        recording: Log of what ran, for tests.

    Attributes:
        h2d: Host to device: prefetches.
        d2h: Device to host: offloads and parks.
        host: Work on the host, such as optimizer updates; waits until the bytes it waits for have arrived.
        compute: Compute, on the caller's thread.
    """

    def __init__(
        self, device: torch.device, *, chaos: Chaos | None = None, recording: Recording | None = None
    ) -> None:
        if device.type != "cpu" and device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self.device = device
        self.chaos = chaos
        self.recording = recording
        self._steps = _Steps()
        cpu = torch.device("cpu")
        self.h2d = Stream("h2d", device, chaos=chaos, recording=recording, steps=self._steps)
        self.d2h = Stream("d2h", device, chaos=chaos, recording=recording, steps=self._steps)
        self.host = Stream("host", cpu, chaos=chaos, recording=recording, steps=self._steps)
        self.compute = ComputeStream(device, chaos=chaos, recording=recording, steps=self._steps)
        self._queues = (self.h2d, self.d2h, self.host)

    @property
    def failure(self) -> Failure | None:
        """The first failure of the current step, until `finish` raises it."""
        return self._steps.current.failure

    def begin(self) -> None:
        """Starts a step. What an unfinished earlier one left is dropped first, its failure forgotten.

        On an accelerator, transfers of this step come after all that the caller's current stream holds by now.
        """
        if self.failure is not None or not all(stream.is_idle for stream in self._queues):
            self.abort(Aborted("abandoned"))
            self._end()
            self._settle_device()
        self._steps.current = Step()
        if self.device.type != "cpu":
            now = torch.accelerator.current_stream(self.device).record_event()
            for stream in self._torch_streams():
                stream.wait_event(now)

    def abort(self, error: BaseException, label: str | None = None) -> None:
        """Drops what is queued and wakes all who wait.

        Args:
            error: Why; `finish` raises it as it is, unless something else had failed before.
            label: Operation at which it happened, if any.
        """
        self._steps.current.abort(Failure(label, error, is_callers=True))

    def wait(self, event: Event) -> None:
        """Blocks the caller until the operation behind `event` is complete, on the device too.

        Raises:
            Aborted: If the step failed; `finish` then raises the failure.
        """
        self._steps.current.wait(CALLER, "wait", event)
        event.wait()

    def finish(self, *, synchronize: bool = True) -> None:
        """Waits until all queues are empty and raises the step's first failure, once.

        Args:
            synchronize: On an accelerator, also blocks until the transfers are complete. If false, the caller's
                current stream waits for them instead.

        Raises:
            ExecuteError: `d2h:G3 failed: ...`, from what an operation raised on a stream's own thread.
            BaseException: What was raised on the caller's thread, or given to `abort`, unharmed.
        """
        failure = self._end()
        if failure is not None:
            self._settle_device()
            try:
                raise failure.surface()
            finally:
                del failure  # its traceback holds this frame
        if synchronize:
            for stream in self._torch_streams():
                stream.synchronize()
        elif self.device.type != "cpu":
            current = torch.accelerator.current_stream(self.device)
            for stream in self._torch_streams():
                current.wait_event(stream.record_event())

    @contextlib.contextmanager
    def step(self, *, synchronize: bool = True) -> Iterator[None]:
        """Begins a step, and finishes it however the body ends.

        An exception of the body leaves as it is; but if an operation on another thread had failed first, that
        failure is raised in its place (except for `KeyboardInterrupt` and its like).
        """
        self.begin()
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Aborted):
                self.abort(error)
            if isinstance(error, Exception):
                self.finish()
            else:
                self._end()
                self._settle_device()
            raise
        self.finish(synchronize=synchronize)

    def close(self) -> None:
        """Drops what is queued and ends the threads."""
        self.abort(Aborted("closed"))
        for stream in self._queues:
            stream.close()

    def _end(self) -> Failure | None:
        """Drains the queues and takes the failure. An interrupted drain aborts the step and is completed."""
        try:
            self._drain()
        except BaseException as error:
            self.abort(error)
            self._drain()
            self._steps.current = Step()
            raise
        failure, self._steps.current = self.failure, Step()
        return failure

    def _drain(self) -> None:
        for stream in self._queues:
            stream.drain()

    def _settle_device(self) -> None:
        """After a failure: waits until the device is done with what was issued, so that memory can be reused."""
        # A device that is broken raises here as well; the first failure is what the caller must see.
        with contextlib.suppress(Exception):
            for stream in self._torch_streams():
                stream.synchronize()
            if self.device.type != "cpu":
                torch.accelerator.current_stream(self.device).synchronize()

    def _torch_streams(self) -> tuple[torch.Stream, ...]:
        streams = (self.h2d.torch_stream, self.d2h.torch_stream)
        return tuple(stream for stream in streams if stream is not None)


def _probe(name: str, chaos: Chaos | None, recording: Recording | None) -> Probe | None:
    return None if chaos is None and recording is None else Probe(name, chaos, recording)
