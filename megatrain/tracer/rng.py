"""Watches torch's random generator for jumps that no recorded call explains."""

from __future__ import annotations

import torch

from megatrain.tracer.refusals import RUN_AGAIN, refuse


class GeneratorWatch:
    """Notices that the model seeds or sets the generator between two draws: a graph draws straight on."""

    def __init__(self) -> None:
        self._state = torch.get_rng_state()

    def check(self, before: torch.Tensor) -> None:
        """Takes note of a call that drew.

        Args:
            before: The generator's state before the call.

        Raises:
            Obstacle: If that isn't where the last draw left it.
        """
        if not torch.equal(before, self._state):
            refuse(
                "seeds or sets the random generator",
                "A graph draws its numbers one after the other, from the caller's generator.",
                "Seed outside the forward.",
                remedy=RUN_AGAIN,
            )
        self._state = torch.get_rng_state()
