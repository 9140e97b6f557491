"""KnownOutcomes: trials of calls, of which one serves all calls that are alike."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from megatrain.passes.dedup import frozen
from megatrain.passes.rewriting.call_trial import Outcome, Site, Target, tried
from megatrain.torch_private import FakeTensorMode


class KnownOutcomes:
    """What calls that a pass adds made in their trials.

    Args:
        device: Where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mode = FakeTensorMode()
        # With the operands that were tried. The arguments live as long as a key that knows them by identity.
        self._known: dict[Hashable, tuple[Outcome, list[fx.Node], Any]] = {}

    def of(
        self, target: Target, args: tuple[Any, ...], kwargs: Mapping[str, Any], site: Site, alike: Hashable
    ) -> Outcome:
        """The outcome of a call: of its own trial, or of that of a call that is alike.

        Args:
            target: As in `tried`.
            args: See there.
            kwargs: See there.
            site: See there.
            alike: Equal for calls that make results of the same kinds of operands of the same kinds; None if no other
                call is known to.

        Raises:
            LowerError: As `tried`.
        """
        if alike is None:
            return tried(target, args, kwargs, site, self._device, self._mode)
        number: dict[fx.Node, int] = {}
        fx.map_arg((args, dict(kwargs)), lambda node: number.setdefault(node, len(number)))
        kinds = tuple((node.meta["spec"], node.meta["requires_grad"]) for node in number)
        key = alike, frozen(args, number), frozen(kwargs, number), kinds, site.grad, site.autocast
        if key not in self._known:
            self._known[key] = tried(target, args, kwargs, site, self._device, self._mode), list(number), (args, kwargs)
        outcome, operands, _ = self._known[key]
        stands_for = dict(zip(operands, number, strict=True))
        return replace(
            outcome,
            operands={storage: stands_for[node] for storage, node in outcome.operands.items()},
            same=None if outcome.same is None else stands_for[outcome.same],
        )
