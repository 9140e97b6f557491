"""Recipe: the model, data and options of the demo's training; the learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatrain.checks import Rule, checked, count, number, optional
from megatrain.scheduler.builder.build import STEP
from megatrain.sizes import SIZE
from megatrain.tracer.given import DEVICE_NAME


def _width_fault(value: Any) -> str | None:
    fault = count(64, 2**16).fault(value)
    return fault if fault is not None or value % 64 == 0 else "is not a multiple of 64"


@checked(
    device=optional(DEVICE_NAME),
    memory=SIZE,
    steps=count(1),
    seconds=number(above=0, below=math.inf, example=200.0),
    micro_batches=STEP["micro_batches"],
    batch_size=count(1),
    context=count(1),
    width=Rule("a multiple of 64 from 64 to 65536", "{name}=256", _width_fault),
    depth=count(1, 1000),
    learning_rate=number(above=0, below=math.inf, example=2e-3),
    warmup_steps=count(1),
    max_grad_norm=number(above=0),
    sample_bytes=count(1, 1_000_000),
    seed=count(0, 2**63 - 1),
)
@dataclass(frozen=True, slots=True)
class Recipe:
    """The model, data and options of the demo's training.

    Args:
        device: Compute device; None takes the accelerator if it has what a run needs, else the CPU.
        memory: Device-memory budget, an int of bytes or a text such as `"10MiB"`.
        steps: Optimizer steps.
        seconds: Training ends after this time even if steps are left.
        micro_batches: Micro-batches per step.
        batch_size: Windows of text per micro-batch.
        context: Bytes per window.
        width: Size of the model's hidden states; a multiple of 64, the size of an attention head.
        depth: Decoder layers.
        learning_rate: Its peak; it warms up, then falls along a cosine.
        warmup_steps: Steps of the warm-up.
        max_grad_norm: Largest norm of all gradients; larger ones are scaled down to it.
        sample_bytes: Length of the text that the trained model writes.
        seed: Fixes the weights, the order of the text and the sample.
    """

    device: str | None = None
    memory: int | str = "18MiB"
    steps: int = 900
    seconds: float = 200.0
    micro_batches: int = 2
    batch_size: int = 1
    context: int = 128
    width: int = 256
    depth: int = 12
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    max_grad_norm: float = 1.0
    sample_bytes: int = 400
    seed: int = 0

    @property
    def windows_per_step(self) -> int:
        """Windows of text in all micro-batches of a step."""
        return self.micro_batches * self.batch_size

    @property
    def tokens_per_step(self) -> int:
        """Bytes of text in all micro-batches of a step."""
        return self.windows_per_step * self.context


def learning_rate(recipe: Recipe, step: int, num_steps: int) -> float:
    """Returns the rate of a step: a linear warm-up to the peak, then a cosine down to a tenth of it.

    Args:
        recipe: Names the peak and the warm-up.
        step: From 0.
        num_steps: Of the whole training. It plays no part in the warm-up, so it may be settled there.
    """
    after_warmup = max(0, step + 1 - recipe.warmup_steps) / max(1, num_steps - recipe.warmup_steps)
    cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * min(after_warmup, 1.0)))
    return recipe.learning_rate * cosine * min(1.0, (step + 1) / recipe.warmup_steps)
