"""Remembers and repeats the state of torch's random generators, host and device."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from megatrain.device import Device
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
    def now(device: Device, opaque: Sequence[Opaque | Observer] = ()) -> RngState:
        """Reads the generators."""
        return RngState(torch.get_rng_state(), device.generator_state(), PythonState.now(opaque) if opaque else None)

    def is_same(self, other: RngState) -> bool:
        """Tells whether both are the same state of torch's generators."""
        of_device = self.device is None or (other.device is not None and torch.equal(self.device, other.device))
        return torch.equal(self.host, other.host) and of_device

    def sharing(self, other: RngState) -> RngState:
        """The same state of torch's generators, with the memory of another where nothing was drawn."""
        host = other.host if torch.equal(self.host, other.host) else self.host
        return RngState(host, self.device, None)

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
        with _moving.turn:
            present = RngState.now(device, opaque)
            state.restore(device)
            try:
                yield
            finally:
                present.restore(device)


class _Moving(threading.local):
    """What this thread holds while it repeats earlier draws."""

    turn: AbstractContextManager[object] = nullcontext()


_moving = _Moving()


@contextmanager
def moving_in_turn(turn: AbstractContextManager[object]) -> Generator[None]:
    """In the body this thread holds `turn` while it repeats earlier draws, so that others who hold it don't see them.

    Each step has a turn of its own: a hook on a gradient, which holds that of its step, may train another model.
    """
    before, _moving.turn = _moving.turn, turn
    try:
        yield
    finally:
        _moving.turn = before


class OwnGenerators:
    """Torch's generators of one micro-batch, separate from the global ones.

    Args:
        state: Where they begin.
        device: Compute device.

    Attributes:
        state: Where torch's generators are now.
    """

    def __init__(self, state: RngState, device: Device):
        self.state = state
        self._device = device

    @contextmanager
    def drawing(self) -> Generator[None]:
        """Runs the body with these generators instead of the global ones, which stay as they are."""
        with kept_generators(self._device):
            self.state.restore(self._device)
            yield
            self.state = RngState.now(self._device)


@dataclass(frozen=True, slots=True, eq=False)
class GlobalGenerators:
    """The states of all global generators: torch's, Python's and NumPy's."""

    torch: RngState
    host: HostRng

    @staticmethod
    def now(device: Device) -> GlobalGenerators:
        """Reads the generators."""
        return GlobalGenerators(RngState.now(device), HostRng.now())

    def is_same(self, other: GlobalGenerators) -> bool:
        """Tells whether nothing was drawn from one to the other."""
        return self.torch.is_same(other.torch) and self.host == other.host

    def restore(self, device: Device) -> None:
        """Sets the generators back to these states."""
        self.torch.restore(device)
        self.host.restore()


@contextmanager
def kept_generators(device: Device) -> Generator[None]:
    """Puts the global generators back behind the body."""
    present = GlobalGenerators.now(device)
    try:
        yield
    finally:
        present.restore(device)
