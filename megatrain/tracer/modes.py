"""Which autocast regions the running code is in."""

from __future__ import annotations

import torch


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """Returns `(device type, dtype)` for the CPU and the accelerator, where autocast is on."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return tuple((d, torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d))
