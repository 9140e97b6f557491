"""What happens around the steps of a fine-tuning's trainer: progress, and Ctrl-C between two steps."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import psutil
from tqdm import tqdm
from transformers import TrainerCallback

from megatrain.counts import counted
from megatrain.progress import is_hidden
from megatrain.ranks.meeting import meet
from megatrain.ranks.ranks import Ranks
from megatrain.sizes import format_bytes

_SAID = b"\nmegatrain: the step is finished and saved first; Ctrl-C once more stops at once.\n"


class StopBetweenSteps(TrainerCallback):
    """Turns the first Ctrl-C into a checkpoint at the end of the step, and an end of the training there.

    As a context it takes over SIGINT. A second Ctrl-C raises KeyboardInterrupt at once. Where SIGINT is ignored, as in
    a shell's background jobs, it stays so. Several processes end with the same step: torchrun sends Ctrl-C to each, and
    it comes to some of them a step later.

    Attributes:
        is_asked: Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._before: Any = None

    def __enter__(self) -> StopBetweenSteps:
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            self._before(number, frame)
            return
        self.is_asked = True
        if not is_hidden():
            os.write(2, _SAID)  # a handler may come in the middle of another print, which isn't re-entrant

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Asks for a checkpoint and the end, if Ctrl-C came in the step."""
        if self._is_asked_of_any(model):
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Ends the training, if Ctrl-C came in the evaluation before this checkpoint or in the writing of it."""
        if self._is_asked_of_any(model):
            control.should_training_stop = True

    def _is_asked_of_any(self, model: Any) -> bool:
        ranks: Ranks | None = None if model is None else model.megatrain.ranks
        if ranks is None:
            return self.is_asked
        return any(word["is asked"] for word in meet(ranks, "the end of a step", {"is asked": self.is_asked}))


class ShowsProgress(TrainerCallback):
    """Shows steps, tokens per second and losses.

    Args:
        tokens_per_step: Tokens of a step, padding included.

    Attributes:
        seconds: How long the steps of this process took, with evaluations and checkpoints.
        num_steps: How many there were.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self.seconds = 0.0
        self.num_steps = 0
        self._tokens_per_step = tokens_per_step
        self._began = 0.0
        self._bar: tqdm[Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins the bar where the training goes on."""
        done, total = state.global_step * self._tokens_per_step, state.max_steps * self._tokens_per_step
        # Off where no terminal shows it; a checkpoint's trainer_state.json has the loss of each step.
        off = is_hidden() or None
        self._bar = tqdm(desc="training", initial=done, total=total, unit="tok", unit_scale=True, disable=off)
        self._began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Shows the loss of a step, or of an evaluation."""
        if self._bar is None:
            return
        if "loss" in logs:
            step, memory = f"{state.global_step}/{state.max_steps}", format_bytes(psutil.Process().memory_info().rss)
            self._bar.set_postfix(step=step, loss=f"{logs['loss']:.3f}", host=memory, refresh=False)
            self._bar.update(self._tokens_per_step)
            self.num_steps += 1
        elif "eval_loss" in logs:
            self._bar.write(f"step    {state.global_step}: {eval_words(logs['eval_loss'])}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the bar."""
        self.seconds = time.perf_counter() - self._began
        self.close()

    def words(self) -> str:
        """Says how many steps this process made, and how fast."""
        tokens = self.num_steps * self._tokens_per_step
        made = f"{counted(self.num_steps, 'step')}, {counted(tokens, 'token')}"
        return f"{made} in {self.seconds:.1f} s: {tokens / self.seconds:.0f} tokens/s"

    def close(self) -> None:
        """Ends the bar, also where a training ends by an error."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def eval_words(loss: float) -> str:
    """Says a held-out loss, in nats per token, and its perplexity."""
    return f"held-out loss {loss:.4f}, perplexity {math.exp(min(loss, 700.0)):.2f}"
