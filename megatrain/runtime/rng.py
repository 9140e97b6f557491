"""Remembers and repeats the state of torch's random generators, host and device."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatrain.tracer.opaque import Opaque
from megatrain.tracer.sandbox import Attributes, HostRng


@dataclass(frozen=True, slots=True, eq=False)
class PythonState:
    """State that the code of opaque modules reads and changes: Python's and NumPy's generators, attributes."""

    generators: HostRng
    attributes: tuple[Attributes, ...]

    @staticmethod
    def now(opaque: Sequence[Opaque]) -> PythonState:
        """Reads the generators and the attributes of opaque modules."""
        return PythonState(HostRng.now(), tuple(Attributes(call.module) for call in opaque))

    def restore(self) -> None:
        """Puts everything back."""
        self.generators.restore()
        for attributes in self.attributes:
            attributes.restore()


@dataclass(frozen=True, slots=True, eq=False)
class RngState:
    """The generators' state at one moment.

    Args:
        host: State of the CPU generator.
        device: State of the compute device's generator; None where the compute device is the host.
        python: What the code of opaque modules sees besides; None where there are none.
    """

    host: torch.Tensor
    device: torch.Tensor | None
    python: PythonState | None

    @staticmethod
    def now(device: torch.device, opaque: Sequence[Opaque] = ()) -> RngState:
        """Reads the generators; on CUDA this is host memory and doesn't wait for the device."""
        state = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return RngState(torch.get_rng_state(), state, PythonState.now(opaque) if opaque else None)

    def restore(self, device: torch.device) -> None:
        """Sets the generators back to this state."""
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.get_device_module(device).set_rng_state(self.device, device)
        if self.python is not None:
            self.python.restore()


@contextmanager
def repeated_rng(state: RngState | None, device: torch.device, opaque: Sequence[Opaque] = ()) -> Generator[None]:
    """Runs the body from `state` and then puts the generators back as they were; None changes nothing."""
    if state is None:
        yield
        return
    present = RngState.now(device, opaque)
    state.restore(device)
    try:
        yield
    finally:
        present.restore(device)
