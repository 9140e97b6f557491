"""Packed state: tensors of several inner ones in an optimizer's state, stored as these."""

from __future__ import annotations

from typing import Any

import torch

from megatrain.errors import CheckpointError
from megatrain.saving.manifest import Manifest
from megatrain.tracer.packing import inner_tensors, is_wrapper, packing_text
from megatrain.tracer.spec import TensorSpec

PACKED = "packed tensor"
"""In a dict that stands for a tensor of several inner ones: how it is made of these; the other entries are these."""


def apart(value: Any) -> Any:
    """Returns what is stored for a state: for a tensor of several inner ones, a dict of these."""
    if not is_wrapper(value):
        return value
    return {PACKED: packing_text(value), **{".".join(path): tensor for path, tensor in inner_tensors(value)}}


def filled(value: Any, existing: torch.Tensor | None, place: str) -> Any:
    """Returns a state as it was before it was stored: what stands for a packed tensor fills the existing one.

    Args:
        value: What was stored, decoded.
        existing: The state that the optimizer has there.
        place: For the error.

    Raises:
        CheckpointError: If the optimizer has no tensor there that is packed alike.
    """
    if not isinstance(value, dict) or PACKED not in value:
        return value
    stored: dict[str, Any] = value
    found = {} if existing is None else {".".join(path): tensor for path, tensor in inner_tensors(existing)}
    is_alike = existing is not None and packing_text(existing) == stored[PACKED]
    if not is_alike or any(TensorSpec.of(found[n]) != TensorSpec.of(stored[n]) for n in found):
        now = "nothing" if existing is None else packing_text(existing) or type(existing).__qualname__
        raise CheckpointError(
            f"`{place}` in the state of the optimizer is {stored[PACKED]} in the checkpoint, and {now} here.\n"
            "  The inner tensors of such a state go into one that the optimizer has made.\n"
            "  Load with TrainStep.load, with the optimizer made as it was when saved."
        )
    with torch.no_grad():
        for name, tensor in found.items():
            tensor.copy_(stored[name])
    return existing


def packed_parameters(manifest: Manifest) -> list[str]:
    """Names the parameters whose saved state has such tensors, which only the optimizer makes."""
    saved = {} if manifest.optimizer is None else manifest.optimizer["state"]
    return [name for name, state in saved.items() if any(isinstance(v, dict) and PACKED in v for v in state.values())]
