"""Gradients: the whole gradients of one step on the host, and where the optimizers' code and hooks find them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from megatrain.optim.norm import NonFinite


@dataclass(slots=True, eq=False)
class Gradients:
    """The whole gradients of one step, on the host.

    Args:
        by_parameter: Gradients that no update has used yet.
        received: The parameters whose gradient has arrived, also if an update has used it.
        norm: Of all gradients; None until it is known, or if nobody asks.
        scale: The factor of clipping.
        nonfinite: The first that isn't finite, if somebody looked.
    """

    by_parameter: dict[torch.Tensor, torch.Tensor]
    received: set[torch.Tensor] = field(default_factory=set[torch.Tensor])
    norm: torch.Tensor | None = None
    scale: float = 1.0
    nonfinite: NonFinite | None = None

    @staticmethod
    def none() -> Gradients:
        """Returns those of a step that begins."""
        return Gradients({})


class GradientSource:
    """Where the optimizer's code finds gradients. An object of its own, so that nothing here needs the collector."""

    def __init__(self, known: Mapping[torch.Tensor, int]):
        self.using = Gradients.none()
        self.chosen: set[torch.Tensor] | None = None  # the only ones to be updated now; None is all
        self._known = known

    def __call__(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Returns the whole gradient of a parameter."""
        if self.chosen is not None and parameter in self._known and parameter not in self.chosen:
            return None
        found = self.using.by_parameter.get(parameter)
        if found is None and parameter not in self._known:
            return parameter.grad  # of a parameter outside the model
        return found


def show_gradients(found: Gradients, *, besides: Iterable[torch.Tensor] = ()) -> None:
    """Lets code of the user's see gradients where it looks for them, clipped; but those of some parameters."""
    others = set(besides)
    for parameter, gradient in found.by_parameter.items():
        if parameter not in others and parameter.grad is not gradient:
            # A copy, which the hooks may keep: gradients lie where the next step's will.
            parameter.grad = gradient.clone().mul_(found.scale)


def take_shown_gradients(found: Gradients) -> None:
    """Reads the gradients back after the hooks."""
    shown: list[tuple[torch.Tensor, torch.Tensor | None]] = [(p, p.grad) for p in found.by_parameter]
    found.by_parameter = {parameter: gradient for parameter, gradient in shown if gradient is not None}
    found.scale = 1.0


def hide_gradients(found: Gradients) -> None:
    """The reverse."""
    for parameter in found.by_parameter:
        parameter.grad = None
