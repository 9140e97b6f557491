"""Remembers and repeats the state of torch's random generators, host and device."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class RngState:
    """The generators' state at one moment.

    Args:
        host: State of the CPU generator.
        device: State of the compute device's generator; None where the compute device is the host.
    """

    host: torch.Tensor
    device: torch.Tensor | None

    @staticmethod
    def now(device: torch.device) -> RngState:
        """Reads the generators; on CUDA this is host memory and doesn't wait for the device."""
        state = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return RngState(torch.get_rng_state(), state)

    def restore(self, device: torch.device) -> None:
        """Sets the generators back to this state."""
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.get_device_module(device).set_rng_state(self.device, device)


@contextmanager
def repeated_rng(state: RngState | None, device: torch.device) -> Generator[None]:
    """Runs the body from `state` and then puts the generators back as they were; None changes nothing."""
    if state is None:
        yield
        return
    present = RngState.now(device)
    state.restore(device)
    try:
        yield
    finally:
        present.restore(device)
