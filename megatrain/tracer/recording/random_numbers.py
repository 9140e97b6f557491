"""Random numbers of a capture: kept apart from those of other threads, and put back where the capture is over."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatrain.base.torch_private import disable_current_modes
from megatrain.device import Device
from megatrain.tracer.recording.obstacles import RUN_AGAIN, refuse

_PIECE = 1 << 20
# Numbers that other threads may draw between two draws of the model: a batch of a loader takes some thousands.
_FARTHEST = 1 << 23
_LOOK = 16
HOST_GENERATORS = "random or numpy.random"


class GeneratorWatch:
    """Gives the model's draws a stream of their own, and notices where the model seeds or sets the generator.

    The process-wide generator is as other threads left it, except while an operation of the model draws.
    """

    def __init__(self) -> None:
        self._own = self._others = torch.get_rng_state()
        self._is_free = False

    @contextmanager
    def free(self) -> Generator[None]:
        """Lets a module that runs its own code at each step do with the generator what it likes."""
        was_free, self._is_free = self._is_free, True
        try:
            yield
        finally:
            self._is_free = was_free

    def draw(self, call: Callable[[], Any]) -> tuple[Any, bool]:
        """Makes a call that draws from the model's own stream; returns its result, and whether it drew.

        Raises:
            Obstacle: If the generator was seeded or set since the last draw: a graph draws straight on.
        """
        if self._is_free:
            return call(), False
        others = self.check_straight()
        before = self._own
        torch.set_rng_state(before)
        try:
            result = call()
        finally:
            with disable_current_modes():
                self._own = torch.get_rng_state()
                has_drawn = not torch.equal(before, self._own)
            torch.set_rng_state(others)
        return result, has_drawn

    def check_straight(self) -> torch.Tensor:
        """Checks that the model has only drawn since its last draw; returns the process-wide state."""
        with disable_current_modes():
            others = torch.get_rng_state()
            is_straight = is_ahead(self._others, others)
            self._others = others
        if not is_straight:
            refuse(
                "seeds or sets the random generator",
                "A graph draws its numbers one after the other, from the caller's generator.",
                "Seed outside the forward.",
                remedy=RUN_AGAIN,
            )
        return others


def is_ahead(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Tells whether drawing alone leads from one state of the CPU's generator to another."""
    if torch.equal(before, now):
        return True
    wanted = _numbers(_at(now), _LOOK)
    generator, seen = _at(before), torch.empty(0, dtype=torch.int32)
    for _ in range(_FARTHEST // _PIECE):
        seen = torch.cat([seen[-_LOOK:], _numbers(generator, _PIECE)])
        for place in (seen[: 1 - _LOOK] == wanted[0]).nonzero().flatten().tolist():
            if torch.equal(seen[place : place + _LOOK], wanted):
                return True
    return False


def _at(state: torch.Tensor) -> torch.Generator:
    return torch.Generator().set_state(state)


def _numbers(generator: torch.Generator, count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int32).random_(generator=generator)


@dataclass(frozen=True, slots=True, eq=False)
class HostRng:
    """State of the generators of Python and of NumPy."""

    python: tuple[Any, ...]
    numpy: Any

    @staticmethod
    def seeded(seed: int) -> HostRng:
        """The state after both were seeded, NumPy's with the lower 32 bits."""
        return HostRng(random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state())

    @staticmethod
    def now() -> HostRng:
        """Reads the generators."""
        return HostRng(random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Sets the generators back to this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostRng) or self.python != other.python:
            return False
        return self.numpy[2:] == other.numpy[2:] and bool((self.numpy[1] == other.numpy[1]).all())

    def __hash__(self) -> int:
        return hash(self.python)


@contextmanager
def kept_rng(device: Device, *, others_draw: bool = False) -> Generator[list[str]]:
    """Restores the random generators at the end; the list then names what moved besides torch's stream.

    Args:
        device: The compute device, whose own generator is restored as well. It isn't initialized for that: a plan
            needs no memory there, and a forked process can't.
        others_draw: What other threads drew meanwhile stays drawn. The body draws nothing from torch's generator on the
            CPU then, and its caller sees to those of Python and NumPy.
    """
    host, cpu = HostRng.now(), torch.get_rng_state()
    seed = torch.initial_seed()
    own = device.generator_state() if device.is_initialized else None
    moved: list[str] = []
    try:
        yield moved
    finally:
        if host != HostRng.now():
            moved.append(HOST_GENERATORS)
        if torch.initial_seed() != seed:
            moved.append("torch.manual_seed")
        if not others_draw:
            host.restore()
        if not (others_draw and is_ahead(cpu, torch.get_rng_state())):
            torch.set_rng_state(cpu)
        if own is not None:
            device.set_generator_state(own)
