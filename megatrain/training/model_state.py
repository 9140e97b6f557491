"""State: the tensors and values of a model that a checkpoint stores, and their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.base.counts import counted
from megatrain.errors import CheckpointError
from megatrain.files import Checkpoint, Saved, Source
from megatrain.tracer.inventory import inventory
from megatrain.tracer.packing import packing_text, registered, unpacked_state
from megatrain.tracer.spec import TensorSpec
from megatrain.training.compiled.inside import Compiled


@dataclass(frozen=True, slots=True)
class State:
    """The state of a model, no tensor copied.

    Args:
        weights: Its own tensors under the names of its state dict.
        hidden: Other tensors that the next step depends on, as `.state/<key>`: buffers that forwards write but no state
            dict has, and tensors that a hook on the state dict left out.
        others: All other entries of the state dict, by name: extra states of modules, and values that hooks added.
    """

    weights: Mapping[str, torch.Tensor]
    hidden: Mapping[str, torch.Tensor]
    others: Mapping[str, Any]

    @staticmethod
    def of(compiled: Compiled) -> State:
        """Reads a model, after all due updates."""
        listed = unpacked_state(compiled.model.state_dict(keep_vars=True))
        entries, tensors = inventory(compiled.model)
        own = {_identity(tensor): tensor for tensor in tensors.values()}
        weights = {
            name: own[_identity(value)]
            for name, value in listed.items()
            if isinstance(value, torch.Tensor) and _identity(value) in own
        }
        shown = set(map(id, weights.values()))
        hidden = {
            HIDDEN + key: tensors[key]
            for key, entry in entries.items()
            if (entry.persistent or key in compiled.written_buffers) and id(tensors[key]) not in shown
        }
        return State(weights, hidden, {name: value for name, value in listed.items() if name not in weights})

    @staticmethod
    def packed(compiled: Compiled) -> dict[str, str]:
        """Says of each packed parameter how it is made of its inner tensors: a checkpoint has only these."""
        named = ((name, packing_text(tensor)) for name, tensor in registered(compiled.model))
        return {name: text for name, text in named if text is not None}

    @staticmethod
    def check_packed(checkpoint: Checkpoint, saved: Mapping[str, str], compiled: Compiled) -> None:
        """Compares how parameters are packed with a checkpoint's.

        Args:
            checkpoint: For the error.
            saved: What `packed` said when it was written.
            compiled: The model.

        Raises:
            CheckpointError: Listing all differences.
        """
        now = State.packed(compiled)
        names = sorted(name for name in now.keys() | saved.keys() if now.get(name) != saved.get(name))
        _refuse(
            checkpoint,
            "packed parameters",
            [f"differs: `{n}` is {saved.get(n, 'plain')}, but {now.get(n, 'plain')} here" for n in names],
        )

    def check_others(self, checkpoint: Checkpoint, saved: Mapping[str, Any]) -> None:
        """Compares the names of extra states with those of a checkpoint.

        Args:
            checkpoint: For the error.
            saved: Its extra states by name.

        Raises:
            CheckpointError: Listing all differences.
        """
        problems = [f"missing: `{name}` is not in the checkpoint" for name in self.others if name not in saved]
        problems += [f"unexpected: `{name}` is not in this model" for name in saved if name not in self.others]
        _refuse(checkpoint, "extra states", problems)

    def places(self, checkpoint: Checkpoint, saved: Mapping[str, Saved], compiled: Compiled) -> dict[str, torch.Tensor]:
        """Finds the places of a checkpoint's hidden tensors in a model.

        Args:
            checkpoint: For the error.
            saved: Its hidden tensors by name.
            compiled: The model.

        Raises:
            CheckpointError: If the model lacks a tensor, has another one in its place, or the checkpoint lacks a
                persistent one.
        """
        entries, tensors = inventory(compiled.model)
        persistent = {HIDDEN + key for key, entry in entries.items() if entry.persistent}
        _refuse(checkpoint, "state", list(self._mismatches(saved, tensors, persistent)))
        return {name: tensors[name.removeprefix(HIDDEN)] for name in saved}

    def _mismatches(
        self, saved: Mapping[str, Saved], tensors: Mapping[str, torch.Tensor], needed: set[str]
    ) -> Iterable[str]:
        # A written buffer may be missing: the run had made no step when it was saved, and the model has it as built.
        for name in (name for name in self.hidden if name in needed and name not in saved):
            yield f"missing: `{name.removeprefix(HIDDEN)}` is not in the checkpoint"
        for name, stored in saved.items():
            key = name.removeprefix(HIDDEN)
            if key not in tensors:
                yield f"unexpected: `{key}` {stored} is not in this model"
            elif (spec := TensorSpec(tuple(tensors[key].shape), tensors[key].dtype)) != stored.spec:
                yield f"differs: `{key}` {stored}, but {spec} here"


HIDDEN = ".state/"
"""In front of the names of hidden tensors; no name of a module begins with a dot."""


def _identity(tensor: torch.Tensor) -> object:
    """Equal for a tensor and any view of all its memory with the same layout, such as `tensor.data`."""
    place = None if tensor.is_meta else Source.of(tensor).place
    return id(tensor) if place is None else place


def _refuse(checkpoint: Checkpoint, what: str, problems: list[str]) -> None:
    if problems:
        lines = [
            f"the checkpoint doesn't fit the {what} of this model: {counted(len(problems), 'difference')}.",
            f"checkpoint: `{checkpoint.folder}`",
            *problems,
            "The next step depends on all saved values.",
            "Build the model as it was.",
        ]
        raise CheckpointError("\n  ".join(lines))
