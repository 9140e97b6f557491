"""TokenAxes: finds out whether operators treat each token alone, by following the axis of tokens through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatrain.passes.rewrites.token_rules import MixesTokensError, OperatorCall, axes_of_results, plain_tensors
from megatrain.torch_private import TorchDispatchMode


class TokenAxes(TorchDispatchMode):
    """Follows, while it is active, the axis along which tokens lie.

    Each operator that reads tokens must compute every token of its results from this token of its operands, and from
    what all tokens share. So whatever is made of such operators can be computed for some tokens at a time. The rules
    are those of torch's own operators, below functions and modules; there are no rules for a user's.

    Attributes:
        mixes: Why an operator isn't known to treat each token alone, if one isn't: it has no rule, or it mixes tokens
            (attention, convolutions, sums over tokens). An error from in here would end the process where C++ expects
            none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mixes: str | None = None
        self._axes: dict[int, int] = {}
        self._groups: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []

    def put(self, tensor: torch.Tensor, axis: int, groups: int = 1) -> torch.Tensor:
        """Says that tokens lie along a dimension of a tensor, all of them in each of so many groups."""
        self._axes[id(tensor)], self._groups[id(tensor)] = axis, groups
        self._alive.append(tensor)
        return tensor

    def axis_of(self, tensor: torch.Tensor) -> int | None:
        """The axis of a tensor's tokens; None if all tokens share it."""
        return self._axes.get(id(tensor))

    def groups_of(self, tensor: torch.Tensor) -> int:
        """How often all tokens come along their axis: a product flattens [texts, tokens] into one dimension."""
        return self._groups.get(id(tensor), 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        asks_alone = func.namespace == "prim"  # for a tensor's device
        if asks_alone or all(self.axis_of(leaf) is None for leaf in plain_tensors((args, kwargs))):
            return result
        made = plain_tensors(result)
        call = OperatorCall(func, args, kwargs or {}, result, self.axis_of)
        try:
            call.groups = self._common_groups(call.operands)
            axes = axes_of_results(func, call)
        except MixesTokensError as error:
            self.mixes, axes = str(error), None
        for tensor, axis in zip(made, axes if isinstance(axes, tuple) else (axes,) * len(made), strict=True):
            if axis is not None:
                self.put(tensor, axis, call.groups)
        return result

    def _common_groups(self, operands: Sequence[torch.Tensor]) -> int:
        found = {self.groups_of(tensor) for tensor in operands if self.axis_of(tensor) is not None}
        if len(found) > 1:
            raise MixesTokensError("tokens come in different groups")
        return found.pop()
