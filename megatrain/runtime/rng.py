"""Remembers and repeats the state of torch's random generators, host and device."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatrain.device import Device, find
from megatrain.tracer.python.holders import Attributes
from megatrain.tracer.recording.observer import Observer, unobserved
from megatrain.tracer.recording.opaque import Opaque
from megatrain.tracer.recording.random_numbers import HostRng


@dataclass(frozen=True, slots=True, eq=False)
class PythonState:
    """State that the code of opaque modules reads and changes: Python's and NumPy's generators, attributes."""

    generators: HostRng
    attributes: tuple[Attributes, ...]

    @staticmethod
    def now(opaque: Sequence[Opaque | Observer]) -> PythonState:
        """Reads the generators and the attributes of opaque modules."""
        return PythonState(HostRng.now(), tuple(call.python_state() for call in opaque))

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
        device: State of the compute device's generator; None where it draws from that of the CPU.
        python: Further state that code of opaque modules reads; None if there are no opaque modules.
    """

    host: torch.Tensor
    device: torch.Tensor | None
    python: PythonState | None

    @staticmethod
    def seeded(seed: int, device: Device) -> RngState:
        """The state after `torch.manual_seed(seed)`; no generator moves."""
        return RngState(torch.Generator().manual_seed(seed).get_state(), device.seeded_state(seed), None)

    @staticmethod
    def now(device: Device, opaque: Sequence[Opaque | Observer] = ()) -> RngState:
        """Reads the generators."""
        return RngState(torch.get_rng_state(), device.generator_state(), PythonState.now(opaque) if opaque else None)

    def restore(self, device: Device) -> None:
        """Sets the generators back to this state."""
        torch.set_rng_state(self.host)
        if self.device is not None:
            device.set_generator_state(self.device)
        if self.python is not None:
            self.python.restore()


@contextmanager
def repeated_rng(state: RngState | None, device: Device, opaque: Sequence[Opaque | Observer] = ()) -> Generator[None]:
    """Runs the body from `state` and then puts the generators back as they were; None changes nothing."""
    with unobserved():
        if state is None:
            yield
            return
        present = RngState.now(device, opaque)
        state.restore(device)
        try:
            yield
        finally:
            present.restore(device)


class OwnGenerators:
    """Generators of one micro-batch, separate from the global ones.

    The blocks of all micro-batches run in turns, so they can't draw from one sequence in the order of a loop over
    micro-batches. The first micro-batch draws from the global generators, each other one as after
    `torch.manual_seed(seed)`.

    Args:
        seed: Seed of torch's generators, host and device, and of Python's and NumPy's.
        device: Compute device.
    """

    def __init__(self, seed: int, device: Device):
        self._device = device
        # torch.manual_seed would reseed the generators of all devices.
        self._state = _Generators(RngState.seeded(seed, device), HostRng.seeded(seed))

    @contextmanager
    def drawing(self) -> Generator[None]:
        """Runs the body with these generators instead of the global ones, which stay as they are."""
        with _kept(self._device):
            self._state.restore(self._device)
            yield
            self._state = _Generators.now(self._device)


def micro_batch_seed(micro_batch: int, device: Device | torch.device | str = "cpu") -> int:
    """The seed of a micro-batch of the step that would begin now; see `OwnGenerators`.

    It is a digest of the states of torch's generators, which it doesn't move: with it a loop over micro-batches can
    repeat a step, if it calls `torch.manual_seed(seed)` before every micro-batch but the first.

    Args:
        micro_batch: From 1; the first micro-batch, 0, draws from the global generators.
        device: Compute device.
    """
    state = RngState.now(find(device))
    parts = [state.host] if state.device is None else [state.host, state.device]
    content = b"".join(bytes(part.numpy()) for part in parts) + micro_batch.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little") >> 1


@dataclass(frozen=True, slots=True, eq=False)
class _Generators:
    """The states of all global generators, torch's and the host's."""

    torch: RngState
    host: HostRng

    @staticmethod
    def now(device: Device) -> _Generators:
        return _Generators(RngState.now(device), HostRng.now())

    def restore(self, device: Device) -> None:
        self.torch.restore(device)
        self.host.restore()


@contextmanager
def _kept(device: Device) -> Generator[None]:
    present = _Generators.now(device)
    try:
        yield
    finally:
        present.restore(device)
