"""Lines on the terminal: `stage` for work without steps to count, `ProgressLine` for a training; `quiet` hides both.

Where stderr is no terminal, as in log files and notebooks, both print a plain line every ten seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import torch
from tqdm import tqdm

from megatrain.base.sizes import format_bytes

_IS_SHOWN: ContextVar[bool] = ContextVar("a stage is shown", default=False)
_IS_QUIET: ContextVar[bool] = ContextVar("nothing is shown", default=False)


@contextmanager
def quiet() -> Generator[None]:
    """Shows no lines while the body runs, where another process of the same work shows them."""
    token = _IS_QUIET.set(True)
    try:
        yield
    finally:
        _IS_QUIET.reset(token)


@contextmanager
def stage(name: str, *, after_s: float = 1.0, every_s: float = 1.0) -> Generator[None]:
    """Shows `name: 00:12` while the body runs, and leaves nothing there. Elsewhere than on a terminal lines stay.

    Of stages within each other the outermost is shown.

    Args:
        name: What the body does.
        after_s: Seconds without a line.
        every_s: Seconds between two looks at the clock.
    """
    if _IS_SHOWN.get() or is_hidden():
        yield
        return
    is_terminal, began = _is_terminal(), time.monotonic()
    over, token = threading.Event(), _IS_SHOWN.set(True)

    def show() -> None:
        while not is_terminal:
            if over.wait(_PLAIN_EVERY_S):
                return
            _print(f"{name}: {time.monotonic() - began:.0f} s")
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
        _IS_SHOWN.reset(token)


def is_hidden() -> bool:
    """Whether this is the body of `quiet`."""
    return _IS_QUIET.get()


def _is_terminal() -> bool:
    """Whether stderr is a terminal: there may be none, or something else in its place."""
    return getattr(sys.stderr, "isatty", bool)()


_PLAIN_EVERY_S = 10.0


def _print(text: str) -> None:
    if sys.stderr is not None:  # a process without a console has none
        print(f"megatrain: {text}", file=sys.stderr, flush=True)


class ProgressLine:
    """Shows steps, tokens per second, the loss and the device's memory.

    A context: `with step.progress_line(...) as line`, then `line.update(loss)` after each step. A loss is read only to
    be shown, which waits for the device, twice a second at most; where nothing is shown, never.

    Args:
        num_steps: Steps of the whole training, those before a resume included.
        tokens_per_step: Tokens of a step, padding included.
        count: How many steps were completed.
        peak_bytes: The device memory that steps took.
        every_s: Seconds between two losses.
    """

    def __init__(
        self,
        num_steps: int,
        tokens_per_step: int,
        count: Callable[[], int],
        peak_bytes: Callable[[], int],
        *,
        every_s: float = 0.5,
    ):
        self._num_steps, self._tokens_per_step = num_steps, tokens_per_step
        self._count, self._peak_bytes, self._every_s = count, peak_bytes, every_s
        done, total = count() * tokens_per_step, num_steps * tokens_per_step
        self._bar: tqdm[Any] = tqdm(
            desc="training", initial=done, total=total, unit="tok", unit_scale=True, disable=is_hidden() or None
        )
        self._began, self._first = time.monotonic(), count()
        self._shown = self._began if self._bar.disable else -every_s

    def update(self, loss: torch.Tensor) -> None:
        """Moves on to the step that was completed.

        Args:
            loss: What the step returned.
        """
        count, now = self._count(), time.monotonic()
        if self._bar.disable:
            if not is_hidden() and now - self._shown >= _PLAIN_EVERY_S:
                self._shown = now
                rate = (count - self._first) * self._tokens_per_step / (now - self._began)
                _print(f"step {count} of {self._num_steps}, loss {loss.item():.3f}, {rate:.0f} tokens/s")
            return
        if now - self._shown >= self._every_s or count >= self._num_steps:
            self._shown = now
            step, device = f"{count}/{self._num_steps}", format_bytes(self._peak_bytes())
            self._bar.set_postfix(step=step, loss=f"{loss.item():.3f}", device=device, refresh=False)
        self._bar.update(count * self._tokens_per_step - self._bar.n)

    def close(self) -> None:
        """Ends the line, which stays on the terminal."""
        self._bar.close()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()
