"""Training: the demo's steps, with a checkpoint every minute and at every end."""

from __future__ import annotations

import signal
import time
from contextlib import nullcontext
from typing import Any

import torch

import megatrain
from megatrain.demo.course import Course
from megatrain.demo.demo_processes import DemoProcesses
from megatrain.demo.recipe import learning_rate
from megatrain.demo.text import step_batches

SAVE_EVERY_S = 60.0


class SelfInterrupt:
    """A loss that presses Ctrl-C once: it sends SIGINT to this process, in the middle of a step.

    Of several processes one ends instead, as if the system had killed it.

    Args:
        at: After which part of the steps, between 0 and 1.
        first_step: Where this process begins; one that begins later is left alone.
        several: The processes of the demo.
    """

    def __init__(self, at: float, first_step: int, several: DemoProcesses):
        self._at = at
        self._first_step = first_step
        self._several = several
        self._is_due = False
        # A shell starts jobs in the background so that they ignore Ctrl-C; this one presses it and has to hear it.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def before_step(self, step: int, num_steps: int) -> bool:
        """Finds out whether it is time."""
        self._is_due = self._first_step < max(1, int(self._at * num_steps)) <= step
        return self._is_due

    def __call__(self, result: Any, batch: Any) -> torch.Tensor:
        """Returns the model's own loss."""
        if self._is_due:
            self._is_due = False
            if self._several.group is None:
                signal.raise_signal(signal.SIGINT)
            else:
                self._several.end_one()
        return result.loss


class Training:
    """Trains a model from where its course is to the end.

    Args:
        compiled: The model, or another whose call with `input_ids` and `labels` returns a loss.
        course: What is trained; if it has a checkpoint, the model and all else is read from there.
        text: What to learn.
        interrupt_at: After which part of the steps to interrupt this process, for show; None doesn't.
        several: The processes that train together.

    Attributes:
        step: Its TrainStep.
    """

    def __init__(
        self,
        compiled: megatrain.CompiledModule,
        course: Course,
        text: bytes,
        *,
        interrupt_at: float | None = None,
        several: DemoProcesses | None = None,
    ):
        self._compiled = compiled
        self._course = course
        self._text = text
        self._several = several or DemoProcesses()
        first = course.saved or 0
        self._interrupt = None if interrupt_at is None else SelfInterrupt(interrupt_at, first, self._several)
        self._optimizer = torch.optim.AdamW(compiled.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
        options: dict[str, Any] = {"loss": self._interrupt, "max_grad_norm": course.recipe.max_grad_norm}
        if course.saved is None:
            self.step = megatrain.TrainStep(compiled, self._optimizer, **options)
        else:
            self.step = megatrain.TrainStep.load(course.folder, compiled, self._optimizer, **options)

    def batch(self) -> list[dict[str, torch.Tensor]]:
        """Returns this process's micro-batches of the next step."""
        batches = step_batches(self._text, self._course.recipe, self._device, self.step.progress.count)
        return self._several.part(next(batches))

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
            # The step in which it came has left no trace. Of several processes others may have gone on.
            if self.step.progress.count > 0 and self._several.group is None:
                self._save()
            raise
        self._save()
        return self.step.progress.count - first

    def _save_of_several(self) -> None:
        """One of several processes ends in the next step: they go on from here."""
        if self._several.group is not None:
            self._save()

    def _save(self) -> None:
        # `from_pretrained` reads the weights together with the model's configuration.
        self._course.save(self.step, self._compiled.config.save_pretrained)

    def _run_steps(self) -> None:
        step, course = self.step, self._course
        batches = step_batches(self._text, course.recipe, self._device, step.progress.count)
        saved = self._several.agreed(time.perf_counter())
        began = saved - course.seconds
        shown = step.progress_line(course.total, course.recipe.tokens_per_step) if self._several.is_first else None
        with shown or nullcontext() as line:
            while course.goes_on(count := step.progress.count):
                for group in self._optimizer.param_groups:
                    group["lr"] = learning_rate(course.recipe, count, course.total)
                if self._interrupt is not None and self._interrupt.before_step(count, course.total):
                    self._save_of_several()
                loss = step(self._several.part(next(batches)))
                loss.item()  # waits for the device: the seconds below are of whole steps
                if line is not None:
                    line.update(loss)
                now = self._several.agreed(time.perf_counter())
                course.spend(step.progress.count, now - began)
                if now - saved >= SAVE_EVERY_S:
                    self._save()
                    saved = time.perf_counter()
