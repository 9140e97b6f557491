"""Asks which hooks stand between autograd and what it saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatrain.torch_private import top_saved_tensors_hooks


def has_hooks() -> bool:
    """Tells whether any hooks on saved tensors are active."""
    return _active() is not None


def has_users_hooks() -> bool:
    """Tells whether the active hooks are the user's, which may change what a backward computes with.

    Those of torch (checkpoints, `save_on_cpu`) only move tensors or compute them again.
    """
    hooks = _active()
    if hooks is None:
        return False
    package = str(getattr(hooks[0], "__module__", "")).partition(".")[0]
    return package not in ("torch", __name__.partition(".")[0])


def _active() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    return top_saved_tensors_hooks(False)
