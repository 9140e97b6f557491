"""Apart: a process that trains a model alone, although `torch.distributed` has others."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from megatrain.errors import ApartWarning, ExecuteError
from megatrain.ranks.processes import ProcessGroup

Group = ProcessGroup | None


class HasGroup(Protocol):
    """A model that knows whether its user has named a process group; see `Compiled`."""

    @property
    def has_group(self) -> bool:
        """Whether there is a group, also one of a single process."""
        ...


_said: WeakSet[HasGroup] = WeakSet()


def others_here() -> int:
    """How many processes the default group of `torch.distributed` has besides this one; 0 without such a group."""
    return dist.get_world_size() - 1 if dist.is_available() and dist.is_initialized() else 0


def refuse_apart() -> None:
    """Refuses a training step that other processes would know nothing of.

    Raises:
        ExecuteError: If there are others.
    """
    others = others_here()
    if others:
        raise ExecuteError(
            f"this step would train the model apart from the {others} other process{'es' if others > 1 else ''} of "
            "torch.distributed.\n"
            "  Gradients go to the processes of the model's process_group, and it was compiled without one.\n"
            "  Train together: megatrain.compile(model, process_group=torch.distributed.group.WORLD). Or train apart\n"
            "  on purpose, in a group of one: process_group=torch.distributed.new_subgroups(1)[0]."
        )


def note_apart(model: HasGroup, results: Sequence[torch.Tensor]) -> None:
    """Warns, once for each model, of a call whose gradients would be those of this process alone.

    Args:
        model: What was called.
        results: Of the call. Within `DistributedDataParallel` their gradients go to the others.
    """
    if model.has_group or model in _said or not others_here():
        return
    if any(tensor.requires_grad for tensor in results) and not _is_in_data_parallel():
        _said.add(model)
        warnings.warn(
            f"loss.backward() leaves the gradients of this process alone, and torch.distributed has {others_here()} "
            "others.\n"
            "  Nothing but DistributedDataParallel, or code of your own, adds theirs.\n"
            "  Train with a TrainStep, and compile(process_group=torch.distributed.group.WORLD); or say that you mean\n"
            "  it: process_group=torch.distributed.new_subgroups(1)[0].",
            ApartWarning,
            stacklevel=4,
        )


def _is_in_data_parallel() -> bool:
    """Whether a module in `DistributedDataParallel` makes this call: nothing public says so but the calling code."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == DistributedDataParallel.__module__:
            return True
        frame = frame.f_back
    return False
