"""What the command adds to each step of a trainer: its losses as lines of a file, and an end that Ctrl-C asks for."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from megatrain.base.counts import counted
from megatrain.base.progress import is_hidden
from megatrain.scheduler.bands import format_s

LOSSES = "losses.jsonl"
_EVERY_S = 10.0


class Losses(TrainerCallback):
    """Writes a line of JSON for each step and each evaluation, and prints some of them where stderr is no terminal.

    A training that goes on keeps the lines up to its checkpoint, and writes the steps after it anew.

    Args:
        every_s: Seconds between two printed lines.
    """

    def __init__(self, folder: Path, every_s: float = _EVERY_S) -> None:
        self._path, self._every_s = folder / LOSSES, every_s
        self._is_printed = not (is_hidden() or getattr(sys.stderr, "isatty", bool)())
        self._shown = self._began = 0.0
        self._first = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins the file with what the checkpoint has."""
        rows = "".join(f"{json.dumps(row)}\n" for row in state.log_history)
        self._path.write_text(rows, encoding="utf-8")
        self._began, self._first = time.monotonic(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Appends the newest row."""
        row = state.log_history[-1]
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")
        now, is_last = time.monotonic(), state.global_step == state.max_steps
        is_due = now - self._shown >= self._every_s or is_last
        if not (self._is_printed and is_due and "loss" in row):
            return
        self._shown = now
        done = state.global_step - self._first
        left = (now - self._began) / max(1, done) * (state.max_steps - state.global_step)
        print(
            f"step    {state.global_step} of {counted(state.max_steps, 'step')}: loss {row['loss']:.4f}, "
            f"learning rate {row['learning_rate']:.2e}; about {format_s(left)} left",
            flush=True,
        )


class StopBetweenSteps(TrainerCallback):
    """Turns the first Ctrl-C into a checkpoint at the end of the step, and an end of the training there.

    As a context it takes over SIGINT. A second Ctrl-C raises KeyboardInterrupt at once. Where SIGINT is ignored, as in
    a shell's background jobs, it stays so.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._before: Any = None

    def __enter__(self) -> StopBetweenSteps:
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            self._before(number, frame)
            return
        self.is_asked = True
        if not is_hidden():
            # A handler may come in the middle of another print, which isn't re-entrant.
            os.write(2, b"\nmegatrain: the step is finished and saved first; Ctrl-C once more stops at once.\n")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Asks for a checkpoint and the end, if Ctrl-C came in the step."""
        if self.is_asked:
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the training, if Ctrl-C came in the evaluation before this checkpoint or in the writing of it."""
        control.should_training_stop = control.should_training_stop or self.is_asked
