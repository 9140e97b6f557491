"""Trials: runs calls on a few tokens, to find whether they treat each token alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx

from megatrain.interrupts import Interrupts
from megatrain.passes.dedup import frozen
from megatrain.passes.exact_fakes import exact_fakes
from megatrain.passes.rewrites.token_axis import TokenAxes
from megatrain.passes.rewrites.token_rules import Axes
from megatrain.passes.rewriting.call_trial import Site, called, enter_modes
from megatrain.tracer.calls import target_name

FEW = 61
"""Tokens of a trial: no usual width, so that their axis can't be taken for another dimension."""
# Calls whose arguments say the shape of the result.
_SIZED = ("view", "reshape", "expand")


class Trials:
    """Runs calls on a few tokens without values, to see whether they treat each alone; equal ones run once.

    Args:
        device: Where the model computes.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._known: dict[Any, Axes] = {}

    def result(self, node: fx.Node, axes: Mapping[fx.Node, int | None], tokens: int) -> Axes:
        """The axes of a call's results, for those of its operands; None if it doesn't treat each token alone."""
        number = {operand: index for index, operand in enumerate(axes)}
        modes = node.meta["grad"], node.meta["autocast"]
        described = tuple((operand.meta["spec"], axis) for operand, axis in axes.items())
        key = node.target, frozen(node.args, number), frozen(node.kwargs, number), modes, described, tokens
        if key not in self._known:
            self._known[key] = self._run(node, axes, tokens)
        return self._known[key]

    def _run(self, node: fx.Node, axes: Mapping[fx.Node, int | None], tokens: int) -> Axes:
        """Runs a call on all tokens, which can't fail, then on a few, for which a literal may not fit."""
        found = self._made(node, node.args, dict(node.kwargs), axes, tokens)
        if found is None or isinstance(found, tuple) or not is_sized(node):
            args, kwargs = node.args, dict(node.kwargs)
        else:
            args, kwargs = sized_arguments(node, found)
        return found if found is not None and self._made(node, args, kwargs, axes, FEW) == found else None

    def _made(
        self,
        node: fx.Node,
        args: Any,
        kwargs: dict[str, Any],
        axes: Mapping[fx.Node, int | None],
        length: int,
    ) -> Axes:
        """Runs a call on so many tokens; returns the axes of its results, or None if it doesn't treat each alone."""
        watch = TokenAxes()

        def operand(given: fx.Node) -> torch.Tensor:
            axis = axes[given]
            made = given.meta["spec"].empty(self._device)
            return made if axis is None else watch.put(made.narrow(axis, 0, length), axis)

        with Interrupts(), ExitStack() as stack:
            stack.enter_context(exact_fakes())
            given: Any = fx.map_arg((args, kwargs), operand)
            enter_modes(stack, Site.of(node))
            stack.enter_context(watch)
            try:
                made = called(node.target, *given)
            except Exception:  # some kernels refuse tensors without values, and a few tokens may not fit: not tiled
                return None
        results = list(made) if isinstance(made, tuple | list) else [made]
        are_tensors = all(isinstance(each, torch.Tensor) for each in results)
        if watch.mixes is not None or not are_tensors or any(watch.groups_of(each) > 1 for each in results):
            return None
        if not isinstance(made, torch.Tensor):
            return tuple(map(watch.axis_of, results))
        axis = watch.axis_of(made)
        shape = node.meta["spec"].shape
        fits = axis is not None and (*shape[:axis], length, *shape[axis + 1 :]) == tuple(made.shape)
        return axis if fits else None


def is_sized(node: fx.Node) -> bool:
    """Tells whether a call's arguments say the shape of its result."""
    return (
        target_name(node) in _SIZED and "spec" in node.meta and not any(isinstance(a, torch.dtype) for a in node.args)
    )


def sized_arguments(node: fx.Node, axis: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call that says its result's shape, for any number of tokens."""
    shape = node.meta["spec"].shape
    return (node.args[0], (*shape[:axis], -1, *shape[axis + 1 :])), {}
