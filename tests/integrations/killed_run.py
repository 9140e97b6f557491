"""The run that a test kills again and again, in a module that a process can import by its name."""

from __future__ import annotations

from pathlib import Path

import torch

from megatrain.errors import CheckpointError
from megatrain.integrations.hf.newest_whole import newest_whole
from tests.integrations.runs import RAGGED, TWO, Scenario, llama, run


def long(steps: int) -> Scenario:
    saved = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, **TWO, "max_steps": steps}
    model = lambda: llama(attention_dropout=0.1)  # noqa: E731
    return Scenario(saved, model=model, rows=RAGGED, streaming={"precision": "bf16"})


def train_on(folder: Path, steps: int) -> None:
    """What a process does that is killed again and again."""
    # A kill may have come in the middle of the first checkpoint, or of its last file: then there is none to go on from.
    try:
        is_new = newest_whole(folder) is None
    except CheckpointError:
        is_new = True
    found = run(long(steps), folder, streams=True, resume_from_checkpoint=None if is_new else True)
    torch.save((found.values, [row for row in found.log if "loss" in row]), folder / "end.part")
    (folder / "end.part").rename(folder / "end.pt")  # a kill may come while it is written
