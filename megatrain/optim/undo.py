"""Undo: what an update is about to write, kept so that a failure in its middle leaves no trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megatrain.optim.master import Master, SplitMaster
from megatrain.optim.masters import Masters
from megatrain.optim.whole_step import Optimizer, own_copy


class Undo:
    """Copies of some parameters, their masters and their state.

    Args:
        optimizer: Holds the state.
        parameters: What the update may write.
        masters: Those that have halves have more to copy.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Iterable[torch.Tensor], masters: Mapping[torch.Tensor, Master]
    ):
        self._optimizer = optimizer
        self._masters = masters
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._state: dict[torch.Tensor, dict[Any, Any] | None] = {}
        for parameter in parameters:
            master = masters.get(parameter)
            written = [parameter.detach(), *([master.low] if isinstance(master, SplitMaster) else [])]
            self._values += [(tensor, tensor.clone()) for tensor in written]
            state = optimizer.state.get(parameter)
            self._state[parameter] = None if state is None else {k: own_copy(v) for k, v in state.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back."""
        for tensor, before in self._values:
            tensor.copy_(before)
        for parameter, state in self._state.items():
            if state is None:
                self._optimizer.state.pop(parameter, None)
            else:
                self._optimizer.state[parameter] = state
            if isinstance(self._masters, Masters):
                self._masters.wrote(parameter)  # both halves
