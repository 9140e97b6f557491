"""Gradients that must be there."""

from __future__ import annotations

import torch


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of a parameter or an input that has one."""
    assert tensor.grad is not None
    return tensor.grad
