"""Completion: takes the updates that are due before anybody reads what they write."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import nn

from megatrain.optim.whole_step import Optimizer


class Flushable(Protocol):
    """Has updates that may be due."""

    def flush(self) -> None:
        """Takes them."""


class Completion:
    """A hook that flushes a step, as long as the step exists; copied or pickled it does nothing.

    Args:
        step: What to flush; not kept alive.
    """

    def __init__(self, step: Flushable | None = None):
        self._step = None if step is None else weakref.ref(step)

    def __call__(self, *_: object) -> None:
        """Takes the updates that are due."""
        step = None if self._step is None else self._step()
        if step is not None:
            step.flush()

    def __reduce__(self) -> tuple[type[Completion], tuple[()]]:
        return Completion, ()

    def __deepcopy__(self, _: object) -> Completion:
        return Completion()

    def watch(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Comes before the state dicts of a model, of each of its modules, and of an optimizer."""
        for module in model.modules():
            module.register_state_dict_pre_hook(self)
        optimizer.register_state_dict_pre_hook(self)
        optimizer.register_load_state_dict_pre_hook(self)
