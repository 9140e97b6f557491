"""Training: the demo's steps, with a checkpoint every minute and at every end."""

from __future__ import annotations

import signal
import time
from typing import Any

import torch

import megatrain
from megatrain.demo.course import Course
from megatrain.demo.recipe import learning_rate
from megatrain.demo.text import step_batches

SAVE_EVERY_S = 60.0


class SelfInterrupt:
    """A loss that presses Ctrl-C once: it sends SIGINT to this process, in the middle of a step.

    Args:
        at: After which part of the steps, between 0 and 1.
        first_step: Where this process begins; one that begins later is left alone.
    """

    def __init__(self, at: float, first_step: int):
        self._at = at
        self._first_step = first_step
        self._is_due = False
        # A shell starts jobs in the background so that they ignore Ctrl-C; this one presses it and has to hear it.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def before_step(self, step: int, num_steps: int) -> None:
        """Finds out whether it is time."""
        self._is_due = self._first_step < max(1, int(self._at * num_steps)) <= step

    def __call__(self, result: Any, batch: Any) -> torch.Tensor:
        """Returns the model's own loss."""
        if self._is_due:
            self._is_due = False
            signal.raise_signal(signal.SIGINT)
        return result.loss


class Training:
    """Trains a model from where its course is to the end.

    Args:
        compiled: The model, or another whose call with `input_ids` and `labels` returns a loss.
        course: What is trained; if it has a checkpoint, the model and all else is read from there.
        text: What to learn.
        interrupt_at: After which part of the steps to interrupt this process, for show; None doesn't.

    Attributes:
        step: Its TrainStep.
    """

    def __init__(
        self, compiled: megatrain.CompiledModule, course: Course, text: bytes, *, interrupt_at: float | None = None
    ):
        self._compiled = compiled
        self._course = course
        self._text = text
        self._interrupt = None if interrupt_at is None else SelfInterrupt(interrupt_at, course.saved or 0)
        self._optimizer = torch.optim.AdamW(compiled.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
        options: dict[str, Any] = {"loss": self._interrupt, "max_grad_norm": course.recipe.max_grad_norm}
        if course.saved is None:
            self.step = megatrain.TrainStep(compiled, self._optimizer, **options)
        else:
            self.step = megatrain.TrainStep.load(course.folder, compiled, self._optimizer, **options)

    def batch(self) -> list[dict[str, torch.Tensor]]:
        """Returns the micro-batches of the next step."""
        return next(step_batches(self._text, self._course.recipe, self._device, self.step.progress.count))

    @property
    def _device(self) -> torch.device:
        return self._compiled.megatrain.options.device.torch_device

    def run(self) -> int:
        """Trains until the steps or the seconds are used up, and saves.

        Returns:
            How many steps were made.

        Raises:
            KeyboardInterrupt: As it came; what was trained until then is saved.
        """
        first = self.step.progress.count
        self._compiled.train()
        try:
            self._run_steps()
        except KeyboardInterrupt:
            # The step in which it came has left no trace.
            if self.step.progress.count > 0:
                self._save()
            raise
        self._save()
        return self.step.progress.count - first

    def _save(self) -> None:
        # `from_pretrained` reads the weights together with the model's configuration.
        self._course.save(self.step, self._compiled.config.save_pretrained)

    def _run_steps(self) -> None:
        step, course = self.step, self._course
        batches = step_batches(self._text, course.recipe, self._device, step.progress.count)
        began, saved = time.perf_counter() - course.seconds, time.perf_counter()
        with step.progress_line(course.total, course.recipe.tokens_per_step) as line:
            while course.goes_on(count := step.progress.count):
                for group in self._optimizer.param_groups:
                    group["lr"] = learning_rate(course.recipe, count, course.total)
                if self._interrupt is not None:
                    self._interrupt.before_step(count, course.total)
                loss = step(next(batches))
                loss.item()  # waits for the device: the seconds below are of whole steps
                line.update(loss)
                now = time.perf_counter()
                course.spend(step.progress.count, now - began)
                if now - saved >= SAVE_EVERY_S:
                    self._save()
                    saved = time.perf_counter()
