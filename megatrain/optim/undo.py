"""Undo: copies of the tensors that an update will write, so that a failure in the middle leaves no trace."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from megatrain.device import is_on_host
from megatrain.optim.impostor import Optimizer, own_copy
from megatrain.optim.masters.halves import Master, SplitMaster
from megatrain.optim.masters.registry import Masters
from megatrain.sizes import aligned
from megatrain.torch_private import pytree
from megatrain.tracer.packed.packing import is_wrapper, plain_tensors, repacked


class Undo:
    """Copies of some parameters, their masters and their state; those of one update at a time.

    The memory stays for the next update: copies that are made and dropped with each block leave holes in the C
    library's heap.

    Args:
        masters: Parameters that have halves have more to copy.
    """

    def __init__(self, masters: Mapping[torch.Tensor, Master]):
        self._optimizer: Optimizer | None = None
        self._masters = masters
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._state: dict[Any, Any] = {}

    def note(self, optimizer: Optimizer, parameters: Collection[torch.Tensor], keys: Iterable[Any] = ()) -> None:
        """Copies the tensors that an optimizer's update of these parameters may write; replaces earlier copies.

        Args:
            optimizer: The user's.
            parameters: Some of its parameters.
            keys: Other keys of its state.
        """
        self._optimizer = optimizer
        masters = (self._masters.get(parameter) for parameter in parameters)
        lows = [master.low for master in masters if isinstance(master, SplitMaster)]
        written = [*(parameter.detach() for parameter in parameters), *lows]
        states = {key: optimizer.state.get(key) for key in (*parameters, *keys)}
        leaves: list[Any] = pytree.tree_leaves(list(states.values()))
        plain = [t for leaf in leaves if isinstance(leaf, torch.Tensor) for t in plain_tensors(leaf)]
        needed = sum(aligned(t.nbytes) for t in (*written, *plain) if _is_dense(t))
        if needed > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # not both at a time
            self._memory = torch.empty(needed, dtype=torch.uint8)
        self._used = 0
        self._values = [(tensor, self._copy(tensor)) for tensor in written]
        self._state = {key: pytree.tree_map(self._copy, state) for key, state in states.items()}

    def _copy(self, value: Any) -> Any:
        if is_wrapper(value):
            return repacked(value, self._copy)
        if not _is_dense(value):
            return own_copy(value)
        place = self._memory[self._used : self._used + value.nbytes].view(value.dtype).view(value.shape)
        self._used += aligned(value.nbytes)
        return place.copy_(value.detach())

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back."""
        assert self._optimizer is not None, "nothing was noted"
        for tensor, before in self._values:
            tensor.copy_(before)
        for key, state in self._state.items():
            if state is None:
                self._optimizer.state.pop(key, None)
            else:
                self._optimizer.state[key] = pytree.tree_map(own_copy, state)
            if isinstance(self._masters, Masters) and isinstance(key, torch.Tensor):
                self._masters.wrote(key)  # both halves


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_on_host(value) and value.layout == torch.strided
