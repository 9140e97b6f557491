"""Containers: the objects around the inputs of a capture (lists, dicts). A forward leaves all alone, or returns one."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.errors import TraceError
from megatrain.torch_private import pytree
from megatrain.tracer.traced import ReturnedArgument
from megatrain.tracer.user_dicts import attributes, contents


@dataclass(frozen=True, slots=True)
class Containers:
    """The arguments of a call, each with what was in it.

    A call of the capture gives the model's code new containers, so that a change of the caller's would be lost. A
    dictionary (a dict or a UserDict) that is changed and returned is known by the result, and each call changes the
    caller's in the same way.

    Args:
        held: Place among the arguments, the argument, its leaves and their layout.
    """

    held: Sequence[tuple[int | str, Any, Sequence[Any], pytree.TreeSpec]]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Containers:
        """Looks into the arguments."""
        placed: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        return Containers([(place, value, *pytree.tree_flatten(contents(value))) for place, value in placed])

    def check(self, result: Any) -> ReturnedArgument | None:
        """Checks that all of them hold what they held, except for a dictionary that is the model's result.

        Returns:
            What the model has changed in the latter.

        Raises:
            TraceError: Naming an argument that was changed.
        """
        returned: ReturnedArgument | None = None
        for name, value, leaves, layout in self.held:
            now, layout_now = pytree.tree_flatten(contents(value))
            if layout_now != layout or not all(map(_is_same, now, leaves)):
                before = pytree.tree_unflatten(leaves, layout)
                entries = _entries(value, before) if value is result else None
                if entries is not None:
                    returned = ReturnedArgument.of(name, *entries)
                    continue
                raise TraceError(
                    f"the model changes its argument `{name}`, a {type(value).__qualname__}.\n"
                    "  In eager, the caller's object would change; a capture knows only the tensors in it.\n"
                    "  Return what is new instead; or, without gradients, call the model in a walk: "
                    "with torch.no_grad(), compiled.megatrain.walk()."
                )
        return returned


def _entries(value: Any, before: Any) -> tuple[Mapping[Any, Any], Mapping[Any, Any]] | None:
    """The entries of a dictionary before the forward and after it; None if something else of it differs, or is it."""
    if type(value) is dict:  # pyright: ignore[reportUnknownArgumentType]
        return before, value  # pyright: ignore[reportUnknownVariableType]
    others = attributes(value)
    if not isinstance(value, UserDict) or {*others, "data"} != {*before}:
        return None
    is_same = all(_is_same(now, before[name]) for name, now in others.items())
    return (before["data"], value.data) if is_same else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, torch.Tensor) and type(one) is type(other) and one == other)
