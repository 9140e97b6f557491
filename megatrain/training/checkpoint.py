"""Checkpoints of a training step: everything that the next step depends on, to a folder and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from megatrain import saving
from megatrain.compiled import CompiledModule
from megatrain.errors import CheckpointError
from megatrain.optim.whole_step import Optimizer
from megatrain.training.boundary import Progress


class Scheduler(Protocol):
    """An LR scheduler, or whatever else has a state of this kind."""

    def state_dict(self) -> dict[str, Any]:
        """Returns its state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Takes a state over."""
        ...


def save(
    folder: str | os.PathLike[str],
    compiled: CompiledModule,
    optimizer: Optimizer,
    progress: Progress,
    *,
    scheduler: Scheduler | None,
    user: Mapping[str, Any] | None,
    shard_bytes: int | str,
    more: Callable[[Path], object] | None,
) -> None:
    """Writes a checkpoint; see `TrainStep.save`."""
    tensors, others = _state(compiled)
    saving.save(
        folder,
        tensors,
        optimizer=optimizer,
        names=_parameters(compiled),
        tensors={**compiled.masters.sources(), **_written_buffers(compiled, tensors)},
        extra={
            "progress": asdict(progress),
            "generators": saving.generators_now(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "modules": others,
            "user": dict(user or {}),
        },
        shard_bytes=shard_bytes,
        more=more,
    )


def restore(
    folder: str | os.PathLike[str], compiled: CompiledModule, optimizer: Optimizer, scheduler: Scheduler | None
) -> tuple[Progress, dict[str, Any]]:
    """Reads a checkpoint into a model, an optimizer, a scheduler and all generators.

    Returns:
        What was trained, and the user's values.

    Raises:
        CheckpointError: If it is damaged, or of something else. Before anything is read, where headers tell.
    """
    checkpoint = saving.load(folder)
    extra = checkpoint.extra
    if (scheduler is None) != (extra["scheduler"] is None):
        has, lacks = ("the checkpoint", "load()") if scheduler is None else ("load()", "the checkpoint")
        raise CheckpointError(
            f"{has} has a scheduler, {lacks} has none.\n  Learning rates would go on as if another had set them.\n"
            "  Give save and load the same."
        )
    if any(parameter.is_meta for parameter in _parameters(compiled).values()):
        compiled.load_weights()
    tensors, others = _state(compiled)
    checkpoint.read_weights(tensors)
    checkpoint.read_optimizer(optimizer, _parameters(compiled))
    _restore_tensors(checkpoint, compiled)
    if others:
        compiled.load_state_dict(extra["modules"], strict=False)
    if scheduler is not None:
        scheduler.load_state_dict(extra["scheduler"])
    saving.restore_generators(extra["generators"])
    return Progress(**extra["progress"]), extra["user"]


def _parameters(compiled: CompiledModule) -> dict[str, torch.Tensor]:
    return dict(nn.Module.named_parameters(compiled, remove_duplicate=False))


def _state(compiled: CompiledModule) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The model's state dict: its own tensors, and the extra state of modules."""
    state = compiled.state_dict(keep_vars=True)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


def _written_buffers(compiled: CompiledModule, saved: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Buffers that no state dict has although forwards write them."""
    written = compiled.written_buffers
    return {_BUFFER + n: b for n, b in compiled.named_buffers() if n in written and n not in saved}


def _restore_tensors(checkpoint: saving.Checkpoint, compiled: CompiledModule) -> None:
    buffers = dict(compiled.named_buffers())
    low = dict(checkpoint.tensors)
    for name in [name for name in low if name.startswith(_BUFFER)]:
        key, saved = name.removeprefix(_BUFFER), low.pop(name)
        if key not in buffers:
            raise CheckpointError(
                f"the model has no buffer `{key}`, which the checkpoint `{checkpoint.folder}` holds.\n"
                "  Buffers that a forward writes belong to the state of training.\n  Build the model as it was."
            )
        saved.read(buffers[key])
    compiled.masters.restore(low)


_BUFFER = "buffers/"
