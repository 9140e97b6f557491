"""newest_whole(): the newest checkpoint of a trainer that was written to its end; clear(): before one is written."""

from __future__ import annotations

import json
import os
from pathlib import Path

from transformers.trainer_utils import get_last_checkpoint

from megatrain.errors import CheckpointError

STATE = "trainer_state.json"
"""The file that a trainer writes last into a checkpoint."""


def newest_whole(folder: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint of a trainer that was written to its end; None if there is no checkpoint at all.

    Raises:
        CheckpointError: If there are some, and none is whole.
    """
    known = sorted(Path(folder).glob("checkpoint-*"), key=_number_of, reverse=True) if Path(folder).is_dir() else []
    for checkpoint in known:
        if _number_of(checkpoint) >= 0 and _is_whole(checkpoint):
            return str(checkpoint)
    if known and get_last_checkpoint(str(folder)) is not None:
        raise CheckpointError(
            f"no checkpoint in `{folder}` is whole: {', '.join(path.name for path in known)}.\n"
            f"  A checkpoint is whole when its {STATE} is written, which comes last.\n"
            "  Train from the beginning, or give the folder of another checkpoint."
        )
    return None


def clear(checkpoint: Path) -> None:
    """Removes from an older checkpoint what says that it is whole, and what another number of processes has written."""
    (checkpoint / STATE).unlink(missing_ok=True)
    for path in checkpoint.glob("rng_state*.pth"):
        path.unlink()


def _number_of(checkpoint: Path) -> int:
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1


def _is_whole(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
