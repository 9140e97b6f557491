"""HostDivision: whether the ranks of this host share the store of a training step, and divide its updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.compiled.inside import Compiled
from megatrain.errors import OptimizerError
from megatrain.optim.impostor import Optimizer
from megatrain.optim.shared.host_parts import HostParts
from megatrain.optim.shared.shareable import unshareable


class HostDivision:
    """Whether ranks of one host divide the updates of some optimizers.

    Args:
        compiled: The model, with its ranks.
        optimizers: In the order of their steps.

    Attributes:
        unshared: Why they don't, if there are others on this host; None if they do.
        shares: Whether this rank shares its store with others.
    """

    def __init__(self, compiled: Compiled, optimizers: Sequence[Optimizer]):
        self._compiled, self._optimizers = compiled, optimizers
        self.unshared: str | None = None
        has_others = compiled.ranks is not None
        if has_others and compiled.masters.kind == "rounded":
            self.unshared = "masters that are rounded at random draw from generators, which can't be shared"
        elif has_others:
            self.unshared = next(filter(None, map(unshareable, optimizers)), None)
        self.shares = has_others and self.unshared is None

    def check(self) -> None:
        """Refuses updates that every rank would make in a store that another step has the ranks share.

        Raises:
            OptimizerError: If that is so.
        """
        shared = self._compiled.engine.shared
        if not self.shares and shared is not None and shared.twins:
            raise OptimizerError(
                f"the ranks of this host share the model's store, but not this step's updates: {self.unshared}.\n"
                "  Another TrainStep of this model divides its updates among them; each rank would make all of these.\n"
                "  Train with one of the two, or in one process."
            )

    def parts(self, blocks: Sequence[Sequence[torch.Tensor]]) -> HostParts | None:
        """Which of the updates of some blocks are this rank's; None if all are.

        Args:
            blocks: The parameters that are updated with each block.
        """
        engine, ranks = self._compiled.engine, self._compiled.ranks
        if not self.shares or engine.shared is None or ranks is None:
            return None
        keys = {tensor: key for key, tensor in engine.tensors.items()}
        known = {parameter: keys[parameter] for block in blocks for parameter in block}
        of_store = engine.shared, self._optimizers, self._compiled.masters
        return HostParts(*of_store, blocks, known, ranks.look)
