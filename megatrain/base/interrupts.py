"""Interrupts: Ctrl-C comes between operations, not in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Holds SIGINT back while the body runs, until `check` or the end.

    Python raises `KeyboardInterrupt` between any two bytecodes of the main thread: half an operation would be done, and
    nobody could tell which half. Nothing is held back on other threads, because signals never arrive there.

    Attributes:
        note: A note for the exception at the end; it says how far the body came.
    """

    def __init__(self) -> None:
        self.note: str | None = None
        self._previous: Any = None
        self._arrived: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived = number, frame

    def check(self) -> None:
        """Lets through an interrupt that arrived in the meantime.

        Raises:
            KeyboardInterrupt: If one arrived, and the previous handler raises it.
        """
        if self._arrived is not None:
            (number, frame), self._arrived = self._arrived, None
            self._previous(number, frame)

    @contextmanager
    def released(self) -> Generator[None]:
        """Lets Ctrl-C through at once within the body, which is the user's code; an earlier one comes first.

        Raises:
            KeyboardInterrupt: See `check`.
        """
        self.check()
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
        try:
            yield
        finally:
            if self._previous is not None:
                signal.signal(signal.SIGINT, self._note)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            try:
                self.check()
            except BaseException as raised:
                if self.note is not None:
                    raised.add_note(self.note)
                raise
