"""Raises KeyboardInterrupt at one line of a file, as Ctrl-C may."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Lines:
    """Counts the lines of some files that run in the body, on this thread, and interrupts at one of them.

    Args:
        files: How their names end.
        at: At which line that runs, from 1; 0 only counts.
        act: What happens there.
    """

    def __init__(self, *files: str, at: int = 0, act: Callable[[], None] | None = None):
        self.files = files
        self.at = at
        self.act = act
        self.count = 0
        self.where = ""

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                if self.act is None:
                    raise KeyboardInterrupt
                self.act()
        return self._trace

    @contextmanager
    def watched(self) -> Generator[None]:
        """Watches the body."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)
