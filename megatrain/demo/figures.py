"""The demo's printed measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence

import megatrain
from megatrain.demo.text import NUM_BYTES
from megatrain.sizes import format_bytes


def format_table(rows: Sequence[tuple[str, str]]) -> str:
    """Returns two aligned columns, indented."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def format_losses(loss: float, baseline: float) -> str:
    """Returns the held-out loss next to its baseline."""
    return format_table(
        [
            ("this model", f"{loss:.3f}"),
            ("unigram baseline", f"{baseline:.3f}"),
            ("uniform bytes", f"{math.log(NUM_BYTES):.3f}"),
        ]
    )


def format_memory(weights: int, budget: int, schedule: megatrain.Schedule, measured: int) -> str:
    """Returns the device's peak next to the budget and the model's own size.

    The measured peak covers memory that the schedule places: slots, values between blocks, gradients. The budget must
    hold the workspace inside the largest block as well.

    Args:
        weights: Bytes of the model.
        budget: Bytes that the device has.
        schedule: Of a training step.
        measured: Most bytes that this process held in training; 0 if it trained nothing.
    """

    def row(nbytes: int) -> str:
        return f"{format_bytes(nbytes)}, {nbytes / weights:.0%} of the weights"

    # AdamW's two moments; and gradients, which wait for their norm.
    on_host = f"{format_bytes(weights)}, on the host; {format_bytes(4 * weights)} with gradients and AdamW"
    return format_table(
        [
            ("weights", on_host),
            ("budget", row(budget)),
            ("the schedule's peak", row(schedule.peak_bytes)),
            ("measured peak", row(measured) if measured else "none: all steps ran in an earlier process"),
            ("with workspace inside blocks", f"{row(schedule.device_bytes)}, by the schedule"),
        ]
    )


def quoted(text: str) -> str:
    """Returns a text with a bar in front of each line."""
    return "\n".join(f"  | {line}" for line in text.splitlines())
