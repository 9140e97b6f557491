"""GradScaler: torch's scaling of fp16 losses, for gradients in host memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch

from megatrain.device import Device
from megatrain.errors import GradScalerWarning

_made: WeakSet[GradScaler] = WeakSet()


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` whose scale and flags are on the host, where the gradients of a compiled model are.

    torch's own keeps both on the accelerator. Its `unscale_` copies them to the host without a wait, so the flag of an
    infinite gradient may be overwritten by a copy that comes late: the update that should be left out is taken.

    Args:
        options: `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval` and `enabled`, as for torch's.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__("cpu", **options)
        self._is_placed = False
        _made.add(self)

    def scale(self, outputs: Any) -> Any:
        """Multiplies a loss, or several, by the scale."""
        if not self._is_placed:
            self._is_placed = True
            super().scale(torch.zeros(()))  # the scale is made where the first loss is
        return super().scale(outputs)


def host_scaler(scaler: torch.amp.GradScaler) -> GradScaler:
    """Returns a scaler that goes on from the state of another."""
    made = GradScaler(enabled=scaler.is_enabled())
    made.load_state_dict(scaler.state_dict())
    return made


def warn_of_torchs_own(dtypes: Iterable[torch.dtype], device: Device) -> None:
    """Warns where a loss is made under fp16 autocast on an accelerator, and no scaler of the host's kind exists.

    Args:
        dtypes: Those of the autocast regions in the model's forward.
        device: Compute device.
    """
    if not device.is_host and torch.float16 in dtypes and not _made:
        warnings.warn(
            "the model runs under fp16 autocast, whose losses a GradScaler scales.\n"
            "  Gradients are in host memory; torch.amp.GradScaler copies its flags there without a wait, and may take\n"
            "  an update whose gradients are infinite.\n"
            "  Use megatrain.GradScaler(), or bf16, which needs none.",
            GradScalerWarning,
            stacklevel=2,
        )
