"""Keeps a capture's random numbers apart from those of other threads, which draw from the same generator."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from megatrain.torch_private import disable_current_modes
from megatrain.tracer.refusals import RUN_AGAIN, refuse

_PIECE = 1 << 20
# Numbers that other threads may draw between two draws of the model: a batch of a loader takes some thousands.
_FARTHEST = 1 << 23
_LOOK = 16


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
