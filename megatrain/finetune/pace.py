"""Pace: how many sequences, micro-batches and steps a fine-tuning has."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatrain.counts import counted
from megatrain.errors import OptionError
from megatrain.finetune.fine_tuning import TOKENS_PER_STEP, FineTuning


@dataclass(frozen=True, slots=True)
class Pace:
    """Counts of a training.

    Args:
        batch: Sequences in a micro-batch.
        width: Tokens of a sequence.
        accumulate: Micro-batches in a step.
        num_steps: Optimizer steps.
        warmup: Steps until the learning rate is at its peak.
        save_every: Steps between two checkpoints.
    """

    batch: int
    width: int
    accumulate: int
    num_steps: int
    warmup: int
    save_every: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, padding included."""
        return self.batch * self.width * self.accumulate

    @staticmethod
    def of(tuning: FineTuning, num_sequences: int, width: int) -> Pace:
        """Works the counts out.

        Args:
            tuning: What is asked for.
            num_sequences: Of the data.
            width: Tokens of a sequence.

        Raises:
            OptionError: If a step is to have less than one micro-batch, or the warm-up is longer than the training.
        """
        tokens = tuning.batch * width
        if tuning.tokens_per_step is not None and tuning.tokens_per_step < tokens:
            raise OptionError(
                f"--tokens-per-step {tuning.tokens_per_step} is less than one micro-batch: {tuning.batch} x {width} "
                "tokens.\n  A step has one micro-batch or more.\n"
                f"  Give --tokens-per-step {tokens}, or a smaller --length or --batch."
            )
        num_batches = math.ceil(num_sequences / tuning.batch)
        asked = tuning.accumulate or max(1, (tuning.tokens_per_step or TOKENS_PER_STEP) // tokens)
        accumulate = min(asked, num_batches)
        per_epoch = math.ceil(num_batches / accumulate)
        num_steps = tuning.steps or math.ceil((tuning.epochs or 1.0) * per_epoch)
        warmup = math.ceil(0.03 * num_steps) if tuning.warmup is None else tuning.warmup
        if warmup > num_steps:
            raise OptionError(
                f"--warmup {warmup} is longer than the training of {counted(num_steps, 'step')}.\n"
                "  The learning rate rises during the warm-up, and falls from there to the last step.\n"
                f"  Give --warmup {num_steps}, or less."
            )
        save_every = tuning.save_every or math.ceil(num_steps / 10)
        return Pace(tuning.batch, width, accumulate, num_steps, warmup, save_every)

    def __str__(self) -> str:
        """What a step is and how many there are."""
        sizes = f"{self.accumulate} x {counted(self.batch, 'sequence')} of {self.width} tokens"
        steps = counted(self.num_steps, "step")
        return f"{steps} of {sizes}, {self.tokens_per_step} tokens; a checkpoint every {self.save_every}"
