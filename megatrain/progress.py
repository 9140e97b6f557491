"""stage(): a line on the terminal for work that takes longer than a moment and has no steps to count."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def stage(name: str, *, after_s: float = 1.0, every_s: float = 1.0) -> Generator[None]:
    """Shows `name: 00:12` while the body runs, and nothing behind it. Off where stderr isn't a terminal.

    Args:
        name: What the body does.
        after_s: Seconds without a line.
        every_s: Seconds between two looks at the clock.
    """
    over = threading.Event()

    def show() -> None:
        if over.wait(after_s):
            return
        with tqdm(desc=name, total=0, bar_format="{desc}: {elapsed}", leave=False, disable=None) as line:
            while not over.wait(every_s):
                line.refresh()

    thread = threading.Thread(target=show, name=f"megatrain-{name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
