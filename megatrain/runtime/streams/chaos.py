"""Chaos and Recording: disturbances that tests put into the streams, and records of the operations."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from megatrain.checks import checked, number, one_of, optional

_PRINTED_FIRST = ("h2d", "compute", "d2h", "host")


class InjectedFailure(RuntimeError):
    """Raised by an operation that `Chaos.fail` names."""


@checked(max_delay_s=number(least=0, below=60, example=0.002), slow=optional(one_of(*_PRINTED_FIRST)))
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


class Probe:
    """Applies a `Chaos` and a `Recording` to the operations of one stream."""

    def __init__(self, stream: str, chaos: Chaos | None, recording: Recording | None) -> None:
        self._stream = stream
        self._chaos = chaos
        self._recording = recording
        self._delay = None if chaos is None else chaos.delay(stream)

    def before(self, label: str, waits: tuple[str, ...], *, is_recovery: bool = False) -> None:
        """Called when the waits of an operation are over, before its work; no failure is injected into a recovery."""
        if self._delay is not None:
            self._delay()
        if self._recording is not None:
            self._recording.add_issued(self._stream, label, waits)
        if self._chaos is not None and not is_recovery and self._chaos.strikes(self._stream, label):
            raise InjectedFailure(f"chaos made {self._stream}:{label} fail")

    def after(self, label: str) -> None:
        """Called after the work of an operation, before others can see that it is done."""
        if self._delay is not None:
            self._delay()
        if self._recording is not None:
            self._recording.add_completed(self._stream, label)
