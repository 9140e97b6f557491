"""What the steps of a compiler are given: a module, a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatrain.checks import Rule, instance_of, mapping_of, optional, sequence_of

EXAMPLE_ARGS = sequence_of(kinds=(tuple, list), what="a tuple of arguments")
EXAMPLE_KWARGS = optional(mapping_of())
MODEL = instance_of(nn.Module, "an nn.Module", "the model itself")


def _name_fault(value: Any) -> str | None:
    if not isinstance(value, torch.device | str | int) or isinstance(value, bool):
        return "is not a device"
    try:
        torch.device(value)
    except (RuntimeError, ValueError, OverflowError):
        return "is not a device"
    return None


def _fault(value: Any) -> str | None:
    """A capture for a device that isn't there would end the process: torch's own kernels abort."""
    fault = _name_fault(value)
    if fault is not None:
        return fault
    device = torch.device(value)
    if device.type == "meta":
        return "has no values to compute with"
    if device.type == "cpu":
        return None
    present = torch.accelerator.current_accelerator(check_available=True)
    if present is None or present.type != device.type:
        return f"is not available here: there is {present or 'no accelerator'}"
    count = torch.accelerator.device_count()
    return f"is not available here: there are {count} of its kind" if (device.index or 0) >= count else None


_WAY = '{name}="cpu", "cuda" or "cuda:0"'
DEVICE_NAME = Rule("a torch.device or the name of one", _WAY, _name_fault)
DEVICE = Rule("a torch.device or the name of one, on this machine", _WAY, _fault)
"""Of models and inputs on meta too: nothing is allocated there before something runs."""
