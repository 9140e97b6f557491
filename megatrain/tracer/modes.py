"""Which autocast regions the running code is in."""

from __future__ import annotations

import torch

from megatrain.device import autocast_kinds


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """Returns `(device type, dtype)` for the CPU and the accelerator, where autocast is on."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in autocast_kinds() if torch.is_autocast_enabled(d))
