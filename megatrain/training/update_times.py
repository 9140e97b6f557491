"""UpdateTimes: chooses when the updates of a step run."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from megatrain.base.checks.several_optimizers import parameters_of
from megatrain.errors import ExecuteError
from megatrain.optim.blockwise import takes_turns
from megatrain.optim.proxy import Optimizer
from megatrain.planning.plan_step import updates_allowed
from megatrain.runtime.accumulation import is_hooked

# Updates that somebody waits for after each of so many steps in a row are no longer left to the next step.
_MOST_LOOKS = 3


class Times(NamedTuple):
    """When the updates of a step run.

    Attributes:
        updates: `"spread"`, `"overlap"`, `"serial"` or `"deferred"`.
        clip: Whether updates wait for a norm.
        reports_norm: Whether updates sum the squares of their gradients for a norm.
        shows_gradients: Whether the user's code gets gradients, or runs in the backward of blocks.
    """

    updates: str
    clip: bool
    reports_norm: bool
    shows_gradients: bool


class UpdateTimes:
    """Chooses anew for each step: hooks and parameters may have come or gone.

    Args:
        model: What is trained.
        optimizers: In the order of their steps.
        overlap: Whether updates may run at the same time as the device's work.
        spread: Whether some of them may run in the next step.
        needs_norm: Whether updates wait for a norm.
        reports_norm: Whether a norm is wanted for which they needn't wait.
        is_fixed: Looks at parameters don't change when updates run: a plan was given, or other ranks wouldn't know.

    Raises:
        ExecuteError: If a hook is on the node that accumulates a gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        overlap: bool,
        spread: bool,
        needs_norm: bool,
        reports_norm: bool,
        is_fixed: bool = False,
    ) -> None:
        _check_accumulations(model)
        self._model, self._optimizers = model, optimizers
        self._overlap, self._spread = overlap, spread
        self._needs_norm, self._reports_norm = needs_norm, reports_norm
        self._looks, self._is_looked = 0, False
        self._most_looks = inf if is_fixed else _MOST_LOOKS

    def note_look(self) -> None:
        """Notes that somebody looked at what due updates change; once between two steps."""
        self._looks += not self._is_looked
        self._is_looked = True

    def note_due(self) -> None:
        """Notes that updates are still due when the next step begins: nobody has looked."""
        self._looks = 0

    @property
    def is_looked_at(self) -> bool:
        """Whether somebody has looked after each of so many steps: then nothing is left to be completed by a look."""
        return self._looks >= self._most_looks

    def spread_no_more(self) -> bool:
        """Leaves no update to the next step any more, because the host lacks the memory for the gradients."""
        self._spread = False
        return True

    def look_no_more(self) -> bool:
        """Updates may be left to a look again, because the host lacks the memory for all of them; False if they are."""
        was_looked_at, self._looks, self._most_looks = self.is_looked_at, 0, inf
        return was_looked_at

    def choose(self, parameters: Sequence[torch.Tensor], *, runs_in_backward: bool = False) -> Times:
        """When the updates of the next step run.

        Args:
            parameters: Those that the model has now.
            runs_in_backward: The user's code runs in the backward of blocks, and may look at parameters there.
        """
        self._is_looked = False
        # Work between the gradients and the updates that may fail must come before the first update.
        in_turn = any(map(takes_turns, self._optimizers))
        # Hooks on an optimizer's step may change gradients, of which the norm is taken before.
        clip = self._needs_norm or (self._reports_norm and in_turn)
        # A step that the user's code with a gradient ends must leave no trace.
        looks = runs_in_backward or any([is_hooked(parameter) for parameter in parameters])
        waits = self._holds_others(parameters) if self._needs_norm else looks
        reports_norm = self._reports_norm and not clip
        may_spread = self._spread and not clip and not self.is_looked_at
        spreads = may_spread and not (reports_norm or self._holds_others(parameters))
        updates, *_ = updates_allowed(overlap=self._overlap, waits=in_turn or waits, clip=clip, spread=spreads)
        return Times(updates, clip, reports_norm, looks)

    def _holds_others(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether an optimizer has parameters outside the model, such as a loss's own: the next loss reads them."""
        return not {*map(id, parameters)}.issuperset(map(id, parameters_of(*self._optimizers)))


def _check_accumulations(model: nn.Module) -> None:
    """Refuses hooks that a step would never run, because it accumulates gradients without autograd's nodes.

    Raises:
        ExecuteError: Naming the parameter.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not parameter.is_leaf or parameter.is_inference():
            continue
        with torch.inference_mode(False):
            node: Any = get_gradient_edge(parameter).node
        for register in (node.register_hook, node.register_prehook):
            # The only way to see the others.
            handle = register(lambda *_: None)
            is_hooked = len(handle.hooks_dict_ref()) > 1
            handle.remove()
            if is_hooked:
                raise ExecuteError(
                    f"a hook on the accumulation of the gradient of `{name}` would never run.\n"
                    "  A training step accumulates gradients itself, without the nodes of autograd's graph.\n"
                    "  Use register_post_accumulate_grad_hook of the parameter, or a loop of your own with backward()."
                )
