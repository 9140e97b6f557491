"""The end of a fine-tuning: its last checkpoint becomes the trained model."""

from __future__ import annotations

import fnmatch
import json
import shutil
from pathlib import Path
from typing import Any

from megatrain.errors import CheckpointError
from megatrain.finetune.run_callbacks import eval_words
from megatrain.finetune.run_record import RunRecord
from megatrain.integrations.hf.newest_whole import STATE, newest_whole

# What only a training needs that goes on. All else in a checkpoint is what save_pretrained() writes.
_OF_TRAINING = ("megatrain", STATE, "training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state*")


def newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Returns the newest checkpoint that is whole and the trainer's state in it; None if there is none.

    A training that was killed while it wrote its first checkpoint has none.
    """
    try:
        found = newest_whole(folder)
    except CheckpointError:
        return None
    return None if found is None else (Path(found), json.loads((Path(found) / STATE).read_text()))


def finish(record: RunRecord, checkpoint: Path, state: dict[str, Any]) -> None:
    """Copies the trained model out of the last checkpoint, notes that all is done, and says how it went.

    Args:
        record: Of the folder.
        checkpoint: The last one.
        state: The trainer's state in it.
    """
    for path in sorted(checkpoint.iterdir()):
        if path.is_file() and not any(fnmatch.fnmatch(path.name, pattern) for pattern in _OF_TRAINING):
            shutil.copy2(path, record.folder / path.name)
    record.is_finished = True
    record.write()
    print(f"result  {said_by(state)}")
    print(f"saved   `{record.folder}`, for from_pretrained(); its checkpoints are needed no longer", flush=True)


def said_by(state: dict[str, Any]) -> str:
    """Says the last losses of a training, from the trainer's state."""
    log: list[dict[str, Any]] = state["log_history"]
    losses = [row["loss"] for row in log if "loss" in row]
    held_out = [row["eval_loss"] for row in log if "eval_loss" in row]
    said = f"step {state['global_step']}: loss {losses[-1]:.4f}" if losses else f"step {state['global_step']}"
    if not held_out:
        return said
    before = f"{held_out[0]:.4f}"
    said += f", {eval_words(held_out[-1])}; before the training {before}"
    if before != f"{held_out[-1]:.4f}":
        return said
    return (
        f"{said}\nwarning the held-out loss is what it was: the model has hardly changed.\n"
        "        What trains more: a larger --lr, more --epochs, or steps of fewer tokens (--tokens-per-step)."
    )
