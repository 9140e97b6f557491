"""Streams: queues of operations, each served by its own thread, that wait for each other's events.

Where the device has streams (an accelerator), a stream also owns one of them: its thread issues work there, and
waiting for an event means waiting until it is issued, then having the device's stream wait for its mark. On the CPU
the same threads do the work itself. Compute is the exception: it runs on the thread that submits, so that autocast,
grad mode, profilers and tracebacks behave as they do without megatrain. That is the caller's thread; but in
`loss.backward()` on an accelerator autograd runs backwards on a thread of its own for each device, there as in eager.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Sequence

from megatrain.device import HOST, Device, DeviceEvent, DeviceStream
from megatrain.runtime.streams.events import CALLER, Aborted, Event, Failure, Session
from megatrain.runtime.streams.stream import Chaos, InjectedFailure, Lane, Queued, Recording, StreamThread

__all__ = ["Chaos", "Event", "InjectedFailure", "Recording", "StreamSet"]


TRANSFERS = ("h2d", "d2h")


class StreamSet:
    """The streams of one engine, and the failures they share.

    Use `with streams.step():` around the submissions of one step, or `begin()`, `abort()` and `finish()`.
    After a failure of any kind the set can be used for the next step.

    Args:
        device: Where compute runs; transfers get streams of their own there if it has any.

    Attributes:
        h2d: Host to device: prefetches.
        d2h: Device to host: offloads and parks.
        host: Work on the host, such as optimizer updates; waits until the bytes it waits for have arrived.
    """

    def __init__(
        self,
        device: Device,
        *,
        chaos: Chaos | None = None,
        recording: Recording | None = None,
    ) -> None:
        self.device = device
        self.chaos = chaos
        self.recording = recording
        self._session = Session()
        self.h2d, self.d2h = (StreamThread(name, device, chaos, recording) for name in TRANSFERS)
        self.host = StreamThread("host", HOST, chaos, recording)
        # That runs at once, on the thread that submits and its current stream of the device.
        self._compute = Lane(CALLER, device, chaos, recording)
        self._queues = {stream.name: stream for stream in (self.h2d, self.d2h, self.host)}
        self._end_of_latest: DeviceEvent | None = None  # on the stream that was the caller's then

    @property
    def failure(self) -> Failure | None:
        """The first failure of the current step, until `finish` raises it."""
        return self._session.failure

    def begin(self, *, is_recovery: bool = False) -> None:
        """Starts a step. The rest of an unfinished earlier step is dropped first, and its failure forgotten.

        On an accelerator, transfers of this step come after all that the caller's current stream holds by
        now, and all of this step comes after the latest one, whose stream may have been another.
        """
        if self.failure is not None or not all(stream.is_idle for stream in self._queues.values()):
            self.abort(Aborted("abandoned"))
            self._end()
            self._settle_device()
        self._session = Session(is_recovery=is_recovery)
        compute = self.device.current_stream()
        if compute is not None:
            if self._end_of_latest is not None:
                compute.wait_event(self._end_of_latest)
            now = compute.record_event()
            for stream in self._device_streams():
                stream.wait_event(now)

    def abort(self, error: BaseException, label: str | None = None) -> None:
        """Drops queued operations and wakes all waiting threads.

        Args:
            error: Why; `finish` raises it as it is, unless something else had failed before.
        """
        self._session.abort(Failure(label, error, is_callers=True))

    def submit(self, name: str, label: str, work: Callable[[], None], waits: Sequence[Event], done: Event) -> None:
        """Queues an operation of the stream of that name; compute runs at once.

        A stream that the set doesn't have works on the host, and is made with its first operation.

        Args:
            done: Settled when it is over: run, failed, or dropped because its step was aborted.

        Raises:
            Aborted: At an operation of compute, if the step has failed; `finish` then raises the failure.
            BaseException: The error of compute's work, unchanged, after aborting the step.
        """
        op = Queued(self._session, label, work, waits, done)
        if name == CALLER:
            self._compute.device_stream = self.device.current_stream()  # the caller's to change
            done.stream = name
            self._compute.perform(op)
            return
        if name not in self._queues:
            self._queues[name] = StreamThread(name, HOST, self.chaos, self.recording)
        self._queues[name].put(op)

    def finish(self, *, waits_for: Collection[str] = TRANSFERS) -> None:
        """Waits until all queues are empty and raises the step's first failure, once.

        Args:
            waits_for: On an accelerator, the transfers that must be complete on return; the caller's current stream
                waits for all. Once `h2d` is, nothing reads the host's memory any more, so the caller may write into
                weights at once. In eager the same write would come after the step in the order of the device's stream.

        Raises:
            ExecuteError: `d2h:G3 failed: ...`, from what an operation raised on a stream's own thread.
            BaseException: An error of the caller's thread, or given to `abort`, unchanged.
        """
        failure = self._end()
        if failure is not None:
            self._settle_device()
            try:
                raise failure.surface()
            finally:
                del failure  # its traceback holds this frame
        compute = self.device.current_stream()
        if compute is None:
            return
        ends: list[DeviceEvent] = []
        for stream in self._queues.values():
            if stream.device_stream is not None:
                compute.wait_event(end := stream.device_stream.record_event())
                ends += [end] if stream.name in waits_for and stream in (self.h2d, self.d2h) else []
        self._end_of_latest = compute.record_event()
        for end in ends:
            self.device.wait_for(end)

    def settle(self) -> None:
        """Blocks until the device is done with all steps so far: what they used may go to other streams."""
        if self._end_of_latest is not None:
            self.device.wait_for(self._end_of_latest)
            self._end_of_latest = None

    @contextlib.contextmanager
    def step(self, *, waits_for: Collection[str] = TRANSFERS, is_recovery: bool = False) -> Generator[None]:
        """Begins a step, and finishes it however the body ends.

        An exception of the body leaves as it is; but if an operation on another thread had failed first, that
        failure is raised in its place (except for `KeyboardInterrupt` and its like).
        """
        self.begin(is_recovery=is_recovery)
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
        self.finish(waits_for=waits_for)

    def close(self) -> None:
        """Drops what is queued and ends the threads; a later step starts them again."""
        self.abort(Aborted("closed"))
        for stream in self._queues.values():
            stream.close(self._session)
        self._session = Session()

    def _end(self) -> Failure | None:
        """Drains the queues and takes the failure. An interrupted drain aborts the step and is completed."""
        try:
            self._drain()
        except BaseException as error:
            self.abort(error)
            self._drain()
            self._session = Session()
            raise
        failure, self._session = self.failure, Session()
        return failure

    def _drain(self) -> None:
        for stream in self._queues.values():
            stream.drain(self._session)

    def _settle_device(self) -> None:
        """After a failure: waits until the device is done with what was issued; memory can be reused then."""
        self._end_of_latest = None
        # A device that is broken raises here as well; the first failure is what the caller must see.
        with contextlib.suppress(Exception):
            self.device.settle()

    def _device_streams(self) -> tuple[DeviceStream, ...]:
        streams = (stream.device_stream for stream in self._queues.values())
        return tuple(stream for stream in streams if stream is not None)
