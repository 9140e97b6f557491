"""Generators: the state of all global random generators as a value that a checkpoint holds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from megatrain.errors import CheckpointError


def generators_now() -> dict[str, Any]:
    """Reads torch's generators, of the CPU and of each CUDA device, Python's and NumPy's."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
    }


def check_generators(state: dict[str, Any]) -> None:
    """Tells whether this machine has the generators of a state.

    Raises:
        CheckpointError: If it has another number of CUDA devices than the state, unless that was read on a machine
            without any.
    """
    cuda: list[torch.Tensor] = state["cuda"]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cuda and len(cuda) != count:
        raise CheckpointError(
            f"the checkpoint has random states of {len(cuda)} CUDA devices, this machine has {count}.\n"
            "  Each device draws from a generator of its own, so the numbers would be others.\n"
            "  Resume with as many devices, or seed anew with torch.manual_seed."
        )


def restore_generators(state: dict[str, Any]) -> None:
    """Sets all generators to what `generators_now` read.

    Raises:
        CheckpointError: As `check_generators`, before anything is set.
    """
    check_generators(state)
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
