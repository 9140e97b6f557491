"""Stream and ComputeStream: operations in order, each after the events it waits for."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

import torch

from megatrain.device import Device, DeviceEvent, DeviceStream, is_late
from megatrain.runtime.streams.chaos import Chaos, Probe, Recording
from megatrain.runtime.streams.events import CALLER, Aborted, Event, Failure, Session, late_words
from megatrain.runtime.streams.turn import work_for


class Queued(NamedTuple):
    """A queued operation. Without work it is a marker: settled when reached, even after a failure."""

    step: Session
    label: str
    work: Callable[[], None] | None
    waits: Sequence[Event]
    done: Event


class Steps:
    """The current step of a set of streams; shared so that streams need not know their owner."""

    __slots__ = ("current",)

    def __init__(self) -> None:
        self.current = Session()


class Lane:
    """All that a thread needs to run a stream's operations, without the stream, which must stay collectable."""

    def __init__(self, name: str, device: Device, probe: Probe | None) -> None:
        self.name = name
        self.device = device
        self.probe = probe
        self.device_stream: DeviceStream | None = None
        self.is_entered = False

    def perform(self, op: Queued) -> None:
        """Runs one operation on this thread and settles its event; raises what went wrong after noting it."""
        step, label, work, waits, done = op
        try:
            if step.failure is not None:
                raise Aborted(label)
            for event in waits:
                step.wait(self.name, label, event)
                if event.mark is not None:
                    self._wait_for_mark(event.mark, event.device)
            if self.probe is not None:
                self.probe.before(label, tuple(event.label for event in waits), is_recovery=step.is_recovery)
            assert work is not None
            work()
            if self.device_stream is not None:
                done.mark, done.device = self.device_stream.record_event(), self.device
            if self.probe is not None:
                self.probe.after(label)
        except Aborted:
            done.settle(failed=True)
            raise
        except BaseException as error:
            if self.name == CALLER and is_late(error):
                error.add_note(late_words(f"{self.name}:{label}"))
            step.abort(Failure(f"{self.name}:{label}", error, is_callers=self.name == CALLER))
            done.settle(failed=True)
            raise
        done.settle()

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
    """A queue of operations run in order by a thread of its own, started at the first `submit`.

    The thread ends at `close()`, or when the stream is garbage collected. All operations are submitted by one
    thread at a time.

    Args:
        name: Name in messages and recordings, such as `h2d`.
        device: Where its work runs; if it has streams, this one owns one of them.
        chaos: Disturbance, for tests.
        recording: Log of what ran, for tests.
        steps: The steps it shares with other streams; `StreamSet` passes it.
    """

    def __init__(
        self,
        name: str,
        device: Device,
        *,
        chaos: Chaos | None = None,
        recording: Recording | None = None,
        steps: Steps | None = None,
    ) -> None:
        self.name = name
        self._steps = Steps() if steps is None else steps
        self._lane = Lane(name, device, _probe(name, chaos, recording))
        self._lane.device_stream = device.new_stream()
        self._queue: SimpleQueue[Queued | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], object] | None = None
        self.is_idle = True

    @property
    def device_stream(self) -> DeviceStream | None:
        """The device's stream; None where it has none."""
        return self._lane.device_stream

    def submit(self, label: str, work: Callable[[], None], waits: Sequence[Event], done: Event) -> None:
        """Queues an operation; returns at once.

        Args:
            label: The operation, for messages and recordings.
            work: Called on this stream's thread, without gradients, in the context of the device's stream.
            waits: Events that must be done before it runs.
            done: Settled when it is over: run, failed, or dropped because its step was aborted.
        """
        self.is_idle = False
        self._put(Queued(self._steps.current, label, work, waits, done))

    def _put(self, op: Queued) -> None:
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

    def mark(self) -> Event:
        """Queues a marker, settled once all that was submitted before is over, failed or not."""
        done = Event(f"end of {self.name}")
        self._put(Queued(self._steps.current, done.label, None, (), done))
        return done

    def drain(self) -> None:
        """Waits until all that was submitted is over (issued, on an accelerator). Raises no failure of it."""
        if not self.is_idle:
            self._steps.current.wait(CALLER, "finish", self.mark(), patient=True)
            self.is_idle = True

    def close(self) -> None:
        """Waits until what is queued is over, then ends the thread. A later `submit` starts another."""
        self.drain()
        if self._thread is not None and self._stop is not None:
            self._stop()
            if self._thread is not threading.current_thread():
                self._thread.join()
            self._thread = self._stop = None
            # The next thread has to enter the device as well.
            self._lane.is_entered = False


class ComputeStream:
    """The compute stream: operations run at once, on the thread that submits them and its current stream of the device.

    That is the caller's thread; in `loss.backward()` on an accelerator, autograd's own thread for the device.

    Args:
        device: Where compute runs.
        chaos: Disturbance, for tests.
        recording: Log of what ran, for tests.
        steps: The steps it shares with other streams; `StreamSet` passes it.
    """

    name = CALLER

    def __init__(
        self,
        device: Device,
        *,
        chaos: Chaos | None = None,
        recording: Recording | None = None,
        steps: Steps | None = None,
    ) -> None:
        self._steps = Steps() if steps is None else steps
        self._device = device
        self._probe = _probe(self.name, chaos, recording)

    def run(self, label: str, work: Callable[[], None], waits: Sequence[Event], done: Event) -> None:
        """Waits for `waits`, runs `work`, settles `done`.

        Raises:
            Aborted: If the step has failed; `StreamSet.finish` then raises the failure.
            BaseException: The error of `work`, unchanged, after aborting the step.
        """
        # A new lane each time: the device's current stream is the caller's to change.
        lane = Lane(self.name, self._device, self._probe)
        lane.device_stream = self._device.current_stream()
        done.stream = self.name
        lane.perform(Queued(self._steps.current, label, work, waits, done))


def _probe(name: str, chaos: Chaos | None, recording: Recording | None) -> Probe | None:
    return None if chaos is None and recording is None else Probe(name, chaos, recording)
