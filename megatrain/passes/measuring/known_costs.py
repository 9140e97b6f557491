"""KnownCosts: costs of templates that were measured, so that equal ones of other programs aren't measured again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatrain.passes.cost import TemplateCost
from megatrain.passes.dedup import template_key
from megatrain.passes.program import Template

MOST = 1000
"""So many costs are kept, the latest ones."""


class KnownCosts:
    """The costs of one planner's, or one capture's, programs.

    A model is lowered many times until a step fits: each time with a few other templates, while the others stay as they
    are. Blocks of one program whose templates are equal share a cost; so do those of several programs.
    """

    def __init__(self) -> None:
        # With the template: what a key knows by its identity must live as long as the key.
        self._known: dict[Any, tuple[Template, TemplateCost]] = {}

    def of(
        self,
        template: Template,
        needs: Sequence[tuple[bool, ...]],
        device: torch.device,
        measure: Callable[[], TemplateCost],
        *,
        fuses: bool = False,
    ) -> TemplateCost:
        """Returns the cost of a template.

        Args:
            template: Which it is.
            needs: For each of its uses, which of its inputs and state need a gradient.
            device: Where it runs.
            measure: Measures it.
            fuses: Whether kernels count as a compiler makes them.
        """
        histories = tuple(node.meta.get("has_history") for node in template.graph.nodes)
        key = template_key(template), histories, tuple(needs), device, fuses
        if key not in self._known:
            self._known[key] = template, measure()
            if len(self._known) > MOST:
                del self._known[next(iter(self._known))]
        return self._known[key][1]
