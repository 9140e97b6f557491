"""Losses: what a training logs, as a file that is always there, and as lines where no terminal shows a bar."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from megatrain.base.counts import counted
from megatrain.base.progress import is_hidden
from megatrain.scheduler.bands import format_s

NAME = "losses.jsonl"
_EVERY_S = 10.0


class Losses(TrainerCallback):
    """Writes a line of JSON for each step and each evaluation, and prints some of them where stderr is no terminal.

    A training that goes on keeps the lines up to its checkpoint, and writes the steps after it anew.

    Args:
        every_s: Seconds between two printed lines.
    """

    def __init__(self, folder: Path, every_s: float = _EVERY_S) -> None:
        self._path, self._every_s = folder / NAME, every_s
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
