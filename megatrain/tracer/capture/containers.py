"""Containers: the objects around the inputs of a capture (lists, dicts), which a forward must leave as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.errors import TraceError
from megatrain.torch_private import pytree


@dataclass(frozen=True, slots=True)
class Containers:
    """The arguments of a call, each with what was in it.

    A call of the capture gives the model's code new containers, so that a change of the caller's would be lost.

    Args:
        held: Name, the argument, its leaves and their layout.
    """

    held: Sequence[tuple[str, Any, Sequence[Any], pytree.TreeSpec]]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Containers:
        """Looks into the arguments."""
        named = {**{f"{number}": value for number, value in enumerate(args)}, **kwargs}
        return Containers([(name, value, *pytree.tree_flatten(value)) for name, value in named.items()])

    def check(self) -> None:
        """Checks that all of them hold what they held.

        Raises:
            TraceError: Naming the argument that was changed.
        """
        for name, value, leaves, layout in self.held:
            now, layout_now = pytree.tree_flatten(value)
            if layout_now != layout or not all(map(_is_same, now, leaves)):
                raise TraceError(
                    f"the model changes its argument `{name}`, a {type(value).__qualname__}.\n"
                    "  In eager, the caller's object would change; a capture knows only the tensors in it.\n"
                    "  Return what is new instead; or, without gradients, call the model in a walk: "
                    "with torch.no_grad(), compiled.megatrain.walk()."
                )


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, torch.Tensor) and type(one) is type(other) and one == other)
