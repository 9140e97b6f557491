"""What the steps of a compiler are given: a module, a device."""

from __future__ import annotations

from torch import nn

from megatrain.checks import Rule, instance_of, mapping_of, optional, sequence_of
from megatrain.device.kinds import fault, fault_of_name

EXAMPLE_ARGS = sequence_of(kinds=(tuple, list), what="a tuple of arguments")
EXAMPLE_KWARGS = optional(mapping_of())
MODEL = instance_of(nn.Module, "an nn.Module", "the model itself")


_WAY = '{name}="cpu", "cuda" or "cuda:0"'
DEVICE_NAME = Rule("a torch.device or the name of one", _WAY, fault_of_name)
DEVICE = Rule("a torch.device or the name of one, on this machine", _WAY, fault)
"""Of models and inputs on meta too: nothing is allocated there before something runs."""
