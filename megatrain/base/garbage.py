"""Holds off Python's garbage collector while graphs and tables are built."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Generator[None]:
    """Switches cyclic garbage collection off for the body, or for the function that it decorates.

    A capture or a table makes a great many objects and keeps nearly all of them. The collector walks them again and
    again, so the time per layer would grow with the depth of the model.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
