"""Updater: one of the optimizers that take a step together, and what is left of its own step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from megatrain.checks.several_optimizers import parameters_of
from megatrain.optim.block_update import MasterStep
from megatrain.optim.blockwise import BlockOptimizer
from megatrain.optim.impostor import Optimizer
from megatrain.optim.rehearsal import shared_state
from megatrain.optim.undo import Undo
from megatrain.torch_private import pytree
from megatrain.tracer.packed.packing import is_wrapper


class Updater:
    """Takes the steps of one optimizer, among those that take each step together; a single optimizer has the only one.

    A step waits until `begin`, and is over after `blocks.finish`.

    Args:
        optimizer: The user's.
        blocks: The parameters that are updated with each block, by any optimizer.
        code: Updates parameters; of all updaters.
        undo: Restores the block whose update failed; of all updaters.

    Attributes:
        optimizer: See above.
        blocks: Takes the optimizer's step.
        is_waiting: A step has begun, but not this optimizer's.
    """

    def __init__(self, optimizer: Optimizer, blocks: Sequence[Sequence[torch.Tensor]], code: MasterStep, undo: Undo):
        self.optimizer = optimizer
        self.blocks = BlockOptimizer(optimizer, blocks, code=code)
        self.is_waiting = False
        self._code = code
        self._undo = undo
        self._held: set[torch.Tensor] = set()

    @property
    def is_under_way(self) -> bool:
        """Whether a step has begun, and this optimizer's isn't over."""
        return self.is_waiting or self.blocks.is_under_way

    @property
    def left(self) -> Set[int]:
        """The blocks that this optimizer hasn't updated yet in the step under way."""
        return frozenset(range(len(self.blocks))) if self.is_waiting else self.blocks.left

    def owned(self, block: int) -> list[torch.Tensor]:
        """The parameters of a block that this optimizer updates."""
        return [parameter for parameter in self.blocks.owned(block) if parameter in self._held]

    def wait(self) -> None:
        """Notes that a step has begun, in which this optimizer's turn is to come."""
        self.is_waiting = True
        self._held = set(parameters_of(self.optimizer))

    def begin(self) -> None:
        """Starts the optimizer's own step; see `BlockOptimizer.begin`."""
        self.blocks.begin()
        self.is_waiting = False
        self._held = set(parameters_of(self.optimizer))  # hooks may have added some

    def update(self, block: int, gradients: Mapping[torch.Tensor, torch.Tensor]) -> bool:
        """Updates this optimizer's parameters of a block; if that fails they are as before, and it may be tried again.

        Returns:
            Whether there was a parameter to update.
        """
        if self.blocks.is_at_once:
            return False
        owned = [parameter for parameter in self.owned(block) if parameter in gradients]
        can_fail = bool(owned) and not self._code.cannot_fail(self.optimizer, owned)
        if can_fail:
            self._undo.note(self.optimizer, owned)
        try:
            self.blocks.update(block)
        except BaseException:
            if can_fail:
                self._undo.restore()
            raise
        for parameter in owned:
            _own(self.optimizer.state.get(parameter, {}), gradients[parameter])
        return bool(owned)

    def update_rest(self) -> bool:
        """Updates what no block has, or all parameters at once; if the latter fails, all are as before.

        Returns:
            Whether all were updated at once.
        """
        if self.blocks.is_at_once:
            self._undo.note(self.optimizer, parameters_of(self.optimizer), shared_state(self.optimizer))
            try:
                self.blocks.update_rest()
            except BaseException:
                self._undo.restore()
                raise
        else:
            self.blocks.update_rest()
        return self.blocks.is_at_once

    def abandon(self) -> None:
        """Ends the step without a further update; see `BlockOptimizer.abandon`."""
        self.is_waiting = False
        self.blocks.abandon()


def _own(state: dict[Any, Any], gradient: torch.Tensor) -> None:
    """Copies what an optimizer kept of a gradient by reference: its memory will be that of the next step's."""
    if gradient.layout != torch.strided:
        return
    place = gradient.untyped_storage().data_ptr()

    def own(value: Any) -> Any:
        if is_wrapper(value):
            return value  # of tensors of its own: no optimizer packs a gradient as it is
        is_kept = isinstance(value, torch.Tensor) and value.layout == torch.strided
        return value.clone() if is_kept and value.untyped_storage().data_ptr() == place else value

    for name, value in state.items():
        state[name] = pytree.tree_map(own, value)
