"""Cpu: the host as the compute device, the plain case."""

from __future__ import annotations

import torch

from megatrain.device.interface import Device


class Cpu(Device):
    """The host. There is only one, so every number means the same device.

    Args:
        index: Number behind the colon, as in `"cpu:0"`.
    """

    can_bind = True
    has_inductor = True
    lock_bytes = 0

    def __init__(self, index: int | None = None) -> None:
        del index
        super().__init__(torch.device("cpu"))
