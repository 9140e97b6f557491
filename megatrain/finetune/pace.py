"""Pace: how many sequences, micro-batches and steps a fine-tuning has."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatrain.counts import counted
from megatrain.errors import OptionError
from megatrain.finetune.fine_tuning import TOKENS_PER_STEP, FineTuning

_ENOUGH = 20
"""Steps of an epoch, below which a model hardly changes, and a warm-up takes too large a part of them."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Counts of a training.

    Args:
        batch: Sequences in a micro-batch.
        width: Tokens of a sequence.
        accumulate: Micro-batches in a step of all processes.
        num_steps: Optimizer steps.
        warmup: Steps until the learning rate is at its peak.
        save_every: Steps between two checkpoints.
        processes: How many divide the micro-batches of a step.
        num_again: Micro-batches that the last step of an epoch takes once more, so that all processes have as many.
        hint: Says that there are few steps, and what makes more; empty if there are enough or they were asked for.
    """

    batch: int
    width: int
    accumulate: int
    num_steps: int
    warmup: int
    save_every: int
    processes: int = 1
    num_again: int = 0
    hint: str = ""

    @property
    def of_each(self) -> int:
        """Micro-batches in a step of one process."""
        return self.accumulate // self.processes

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step of all processes, padding included."""
        return self.batch * self.width * self.accumulate

    @staticmethod
    def of(tuning: FineTuning, num_sequences: int, width: int, processes: int = 1) -> Pace:
        """Works the counts out.

        Args:
            tuning: What is asked for.
            num_sequences: Of the data.
            width: Tokens of a sequence.
            processes: How many train together.

        Raises:
            OptionError: If a step is to have less than one micro-batch, or the warm-up is longer than the training; if
                processes can't divide a step.
        """
        tokens = tuning.batch * width
        if tuning.tokens_per_step is not None and tuning.tokens_per_step < tokens:
            raise OptionError(
                f"--tokens-per-step {tuning.tokens_per_step} is less than one micro-batch: {tuning.batch} x {width} "
                "tokens.\n  A step has one micro-batch or more.\n"
                f"  Give --tokens-per-step {tokens}, or a smaller --length or --batch."
            )
        num_batches = math.ceil(num_sequences / tuning.batch)
        accumulate = min(_asked(tuning, num_batches, tokens, processes), num_batches)
        _check_parts(tuning, num_batches, tokens, accumulate, processes)
        per_epoch = math.ceil(num_batches / accumulate)
        num_steps = tuning.steps or math.ceil((tuning.epochs or 1.0) * per_epoch)
        default = math.ceil(0.03 * num_steps) if num_steps >= _ENOUGH else 0
        warmup = default if tuning.warmup is None else tuning.warmup
        if warmup > num_steps:
            raise OptionError(
                f"--warmup {warmup} is longer than the training of {counted(num_steps, 'step')}.\n"
                "  The learning rate rises during the warm-up, and falls from there to the last step.\n"
                f"  Give --warmup {num_steps}, or less."
            )
        save_every = tuning.save_every or math.ceil(num_steps / 10)
        num_again = -(num_batches % accumulate) % processes if num_steps >= per_epoch else 0
        hint = _hint(per_epoch, accumulate) if num_steps < _ENOUGH and tuning.steps is None else ""
        return Pace(tuning.batch, width, accumulate, num_steps, warmup, save_every, processes, num_again, hint)

    def __str__(self) -> str:
        """What a step is and how many there are."""
        sizes = f"{self.accumulate} x {counted(self.batch, 'sequence')} of {self.width} tokens"
        steps = counted(self.num_steps, "step")
        return f"{steps} of {sizes}, {self.tokens_per_step} tokens; a checkpoint every {self.save_every}"

    def parts(self) -> list[str]:
        """What each of several processes takes of a step; nothing of a single one."""
        if self.processes == 1:
            return []
        sizes = f"{self.of_each} x {counted(self.batch, 'sequence')}"
        tokens = self.tokens_per_step // self.processes
        lines = [f"{self.processes} processes, each takes {sizes} of a step, {tokens} tokens"]
        if self.num_again:
            again = counted(self.num_again, "micro-batch")
            lines.append(f"the last step of an epoch takes {again} once more, so that each has as many")
        return lines


def _asked(tuning: FineTuning, num_batches: int, tokens: int, processes: int) -> int:
    """Micro-batches in a step of all processes: by default so few that an epoch of little data has steps enough."""
    if tuning.accumulate is not None:
        return tuning.accumulate
    asked = max(1, (tuning.tokens_per_step or TOKENS_PER_STEP) // tokens)
    is_asked = tuning.tokens_per_step is not None or tuning.steps is not None
    if is_asked or (most := num_batches // _ENOUGH) >= asked:
        return asked
    return max(most - most % processes, processes)


def _hint(per_epoch: int, accumulate: int) -> str:
    smaller = "" if accumulate == 1 else ", or a smaller --tokens-per-step or --accumulate"
    return f"so few steps hardly change a model. Give --epochs {math.ceil(_ENOUGH / per_epoch)}{smaller}"


def _check_parts(tuning: FineTuning, num_batches: int, tokens: int, accumulate: int, processes: int) -> None:
    """Refuses a step that processes can't divide."""
    if num_batches < processes:
        raise OptionError(
            f"the data has {counted(num_batches, 'micro-batch')}, and there are {processes} processes.\n"
            "  Each process takes at least one micro-batch of each step.\n"
            f"  Start at most {num_batches} of them, or give more data or a smaller --batch."
        )
    if accumulate % processes == 0:
        return
    below = accumulate - accumulate % processes
    fits = [count for count in (below, below + processes) if 0 < count <= num_batches]
    name, unit = ("--accumulate", 1) if tuning.tokens_per_step is None else ("--tokens-per-step", tokens)
    raise OptionError(
        f"{processes} processes can't divide a step of {counted(accumulate, 'micro-batch')}"
        f"{', all that the data has' if accumulate == num_batches else ''}.\n"
        "  A step is that of all processes, and each takes as many micro-batches of it.\n"
        f"  Give {name} {' or '.join(str(count * unit) for count in fits)}, or start another number of processes."
    )
