"""The command run here or in a process of its own, and what a finished training is compared by."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from megatrain import cli

ROOT = Path(__file__).parents[2]
_TIMES = ("runtime", "per_second", "flos")


def train(*arguments: object) -> int:
    """Runs the command in this process; returns its status."""
    AcceleratorState._reset_state(reset_partial_state=True)  # accelerate keeps what a process began with
    return cli.main(["train", *map(str, arguments)])


def started(*arguments: object) -> subprocess.Popen[str]:
    """Starts the command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "megatrain", "train", *map(str, arguments)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def rows_of(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The losses, norms and rates of a trainer's log; no times, and no sums of one process."""
    kept = [row for row in log if "train_loss" not in row]
    return [{key: value for key, value in row.items() if not any(word in key for word in _TIMES)} for row in kept]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def log_of(folder: Path) -> list[dict[str, Any]]:
    """The log of a training in its last checkpoint."""
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    return rows_of(json.loads((last / "trainer_state.json").read_text())["log_history"])
