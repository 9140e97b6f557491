"""What the steps of a compiler are given: a module, a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatrain.checks import Rule, instance_of, mapping_of, optional, sequence_of

EXAMPLE_ARGS = sequence_of(kinds=(tuple, list), what="a tuple of arguments")
EXAMPLE_KWARGS = optional(mapping_of())
MODEL = instance_of(nn.Module, "an nn.Module", "the model itself")


def _fault(value: Any) -> str | None:
    if not isinstance(value, torch.device | str | int) or isinstance(value, bool):
        return "is not a device"
    try:
        torch.device(value)
    except (RuntimeError, ValueError, OverflowError):
        return "is not a device"
    return None


DEVICE = Rule("a torch.device or the name of one", '{name}="cpu", "cuda" or "cuda:0"', _fault)
