"""BlockOptimizer: any torch optimizer, one block's parameters at a time where its code is known to allow that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch

from megatrain.base.host_limits import return_free_memory
from megatrain.base.torch_features import check_torch
from megatrain.base.torch_private import GLOBAL_POST_HOOKS, GLOBAL_PRE_HOOKS
from megatrain.errors import OptimizerError
from megatrain.optim.block_update import MasterStep
from megatrain.optim.per_parameter import check_steps, is_per_parameter
from megatrain.optim.prepared import FastGroups, PreparedBlock
from megatrain.optim.proxy import Members, Optimizer, OptimizerStep, StepCode, Undo, own_state, step_code


class OwnHook:
    """A hook that this package puts before `optimizer.step`; updates block by block don't run it."""


class BlockOptimizer:
    """Takes the steps of a torch optimizer block by block, with the bits of `optimizer.step()`.

        blocks.begin()
        for block in any_order:
            blocks.update(block)
        blocks.finish()

    The optimizer stays the user's own: its state is in `optimizer.state`, its options are read from `param_groups` when
    a step begins. Changes by a scheduler or the user during a step take effect with the next step. Hooks on the step
    run once, those before it in `begin` and those after it in `finish`. `update` may run on another thread than the
    rest; two updates at once may not.

    A parameter of several blocks is updated with the first of them, where its gradient is complete last.
    Parameters of the optimizer that are in no block are updated by `finish`. So are all of them, at once and by the
    optimizer itself, unless it `is_per_parameter`: its code may do anything then.

    Args:
        optimizer: The user's.
        blocks: The parameters of each block. Those that the optimizer doesn't have stay as they are.
        code: Updates the parameters in an optimizer's groups; None is the optimizer's own `step`.
        undo: Restores the parameters whose update failed; None leaves them as they are then.

    Attributes:
        optimizer: See above.
        is_waiting: A step has begun, in which this optimizer's turn is to come.
        is_at_once: The step under way updates all parameters at once, in `finish`; all blocks are left until then.

    Raises:
        OptimizerError: If its `step` can't be called without arguments; see `check_steps`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        blocks: Sequence[Sequence[torch.Tensor]],
        *,
        code: StepCode | None = None,
        undo: Undo | None = None,
    ):
        check_torch()
        check_steps(optimizer)
        self.optimizer = optimizer
        self.is_waiting = self.is_at_once = False
        self._code = code or step_code(type(optimizer))
        self._undo = undo
        self._blocks: list[set[torch.Tensor]] = []
        seen: set[torch.Tensor] = set()
        for block in blocks:
            self._blocks.append(set(block) - seen)
            seen |= self._blocks[-1]
        self._seen = seen
        self._members: Members | None = None
        self._outside: set[torch.Tensor] = set()
        self._owned: dict[int, list[torch.Tensor]] = {}
        self._step: OptimizerStep | None = None
        self._after: list[Any] = []
        self._left: set[int] = set()
        self._has_rest = False
        self._fast: FastGroups | None = None
        self._prepared: dict[int, PreparedBlock | None] = {}

    def owned(self, block: int) -> list[torch.Tensor]:
        """The parameters of a block that this optimizer updates, once `wait` or `begin` has looked."""
        if block not in self._owned:
            held = set[torch.Tensor]() if self._members is None else self._members.held
            self._owned[block] = [parameter for parameter in self._blocks[block] if parameter in held]
        return self._owned[block]

    @property
    def left(self) -> Set[int]:
        """The blocks that are not updated yet in the step under way."""
        return frozenset(range(len(self._blocks))) if self.is_waiting else self._left

    @property
    def has_begun(self) -> bool:
        """Whether the optimizer's own step has begun and not ended."""
        return self._step is not None

    @property
    def is_under_way(self) -> bool:
        """Whether a step has begun, and this optimizer's isn't over."""
        return self.is_waiting or self.has_begun

    @property
    def has_hooks(self) -> bool:
        """See `has_hooks`."""
        return has_hooks(self.optimizer)

    def wait(self) -> None:
        """Notes that a step has begun, in which this optimizer's turn is to come."""
        self.is_waiting = True
        self._look()

    @property
    def outside(self) -> Set[torch.Tensor]:
        """The parameters that are in no block."""
        self._look()
        return self._outside

    def _look(self) -> Members:
        if self._members is None or not self._members.are_those_of(self.optimizer):
            held = None if self._members is None else self._members.held
            self._members = Members(self.optimizer)
            self._outside = self._members.held - self._seen
            if self._members.held != held:
                self._owned.clear()
        return self._members

    def begin(self) -> None:
        """Starts the optimizer's own step: runs the hooks before it and reads the options.

        Raises:
            OptimizerError: If a step is under way, `optimizer.step` was replaced, or a hook adds arguments to it.
        """
        optimizer = self.optimizer
        if self._step is not None:
            raise OptimizerError(
                "a step is under way.\n  A step must end before the next begins.\n  Call finish() first."
            )
        _check_not_replaced(optimizer)
        for hook in _pre_hooks(optimizer):
            result: Any = hook(optimizer, (optimizer,), {})
            if result is not None and (len(result[0]) > 1 or result[1]):
                raise OptimizerError(
                    "a hook of register_step_pre_hook gives `step` arguments.\n"
                    "  For updates block by block, `step` takes no arguments and no closure.\n"
                    "  Remove the hook, or call optimizer.step() yourself."
                )
        # In a plain loop, a due step would have been over before this hook was registered.
        self._after = _post_hooks(optimizer)
        members = self._look()  # hooks may have added some
        self._step = OptimizerStep(optimizer, self._code, members)
        self._fast = FastGroups(optimizer, self._step.groups, members)
        self._left = set(range(len(self._blocks)))
        self.is_at_once, self._has_rest, self.is_waiting = not is_per_parameter(optimizer), True, False
        if "step" in vars(optimizer):
            # A scheduler's patch of `step` sets this mark. Without the mark the scheduler warns that it steps before
            # the optimizer.
            optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]

    def update(self, block: int, gradients: Mapping[torch.Tensor, torch.Tensor] | None = None) -> bool:
        """Updates the parameters of a block, unless all are updated at once; those without a gradient stay as they are.

        Args:
            block: The block.
            gradients: What the parameters are updated with, if that isn't their `.grad`. Its memory is used again, so
                state that is a part of it becomes a copy.

        Returns:
            Whether one of these gradients was used.

        Raises:
            OptimizerError: If no step has begun, or the block was updated in it.
        """
        if self._step is None or block not in self._left:
            why = "no step has begun" if self._step is None else f"block {block} has no update left in this step"
            raise OptimizerError(f"{why}.\n  A step is begin(), update() once for each block, finish().")
        if self.is_at_once:
            return False
        given, owned = gradients or {}, self.owned(block)
        found = [given.get(parameter) for parameter in owned]
        if self._run_prepared(block, owned, found):
            self._left.remove(block)
            return True
        used = [parameter for parameter in owned if parameter in given]
        if self._blocks[block]:
            num_states = len(self.optimizer.state)
            with nullcontext() if self._undo is None else self._undo.undoing(self.optimizer, used):
                self._step.update(self._blocks[block])
            if len(self.optimizer.state) > num_states:
                return_free_memory()  # otherwise temporary memory between new states would never be free again
        self._left.remove(block)
        for parameter in used:
            own_state(self.optimizer.state.get(parameter, {}), given[parameter])
        is_hopeless = block in self._prepared and self._prepared[block] is None  # its parameters have no such update
        if used and not is_hopeless and self._fast is not None and isinstance(self._code, MasterStep):
            self._prepared[block] = self._code.prepare(owned, found, self._fast, self.optimizer.state)
        return bool(used)

    def _run_prepared(
        self, block: int, owned: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> bool:
        """Updates a block as it was updated before, if nothing but its gradients has changed; tells whether it has."""
        prepared = self._prepared.get(block)
        if prepared is None or self._fast is None or not isinstance(self._code, MasterStep):
            return False
        return self._code.run(prepared, owned, gradients, self._fast, self.optimizer.state)

    def options(self, parameter: torch.Tensor) -> Any:
        """The options of a parameter's fast path in the step under way; None if it isn't this optimizer's."""
        found = None if self._fast is None else self._fast.of(parameter, is_whole=parameter.dtype == torch.float32)
        return None if found is None else found[1]

    def note_updated(self, block: int) -> None:
        """Notes that the device has updated a block."""
        self._left.discard(block)
        self._prepared.pop(block, None)

    def reopen(self, block: int) -> None:
        """Lets a block be updated again, because a part of its update is left that somebody else was to make."""
        self._left.add(block)

    def update_rest(self) -> bool:
        """Updates the parameters that are in no block, or all at once; `finish` does if nobody has.

        Returns:
            Whether all were updated at once.

        Raises:
            OptimizerError: If no step has begun, or blocks were not updated.
        """
        if self._step is None or (self._left and not self.is_at_once):
            why = "no step has begun" if self._step is None else f"blocks {sorted(self._left)} were not updated"
            raise OptimizerError(f"{why}.\n  A step is begin(), update() once for each block, finish().")
        rest = self._outside if self._has_rest else set[torch.Tensor]()
        if self.is_at_once and self._has_rest:
            with nullcontext() if self._undo is None else self._undo.undoing_all(self.optimizer):
                self._step.update_at_once()
        elif rest:
            self._step.update(rest)
        self._has_rest = False
        self._left.clear()
        return self.is_at_once

    def finish(self) -> None:
        """Ends a step: updates what is left, and runs the hooks after it.

        Raises:
            OptimizerError: See `update_rest`.
        """
        self.update_rest()
        assert self._step is not None
        if not self.is_at_once:
            self._step.commit()
        self._step = self._fast = None
        for hook in self._after:
            hook(self.optimizer, (self.optimizer,), {})

    def abandon(self) -> None:
        """Ends a step early: no further update runs, and no hook.

        Blocks already updated stay so; options and attributes are as they were when the step began.
        """
        self.is_waiting, self._step, self._fast = False, None, None
        self._left.clear()


def takes_turns(optimizer: Optimizer) -> bool:
    """Whether code of the user's sees a step as in a plain loop: all gradients, and what optimizers before it did."""
    return has_hooks(optimizer) or not is_per_parameter(optimizer)


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks run before or after the step: they may want all gradients, or all parameters, to be ready."""
    return next(chain(_pre_hooks(optimizer), _post_hooks(optimizer)), None) is not None


def _pre_hooks(optimizer: Optimizer) -> list[Any]:
    hooks = [*GLOBAL_PRE_HOOKS.values(), *optimizer._optimizer_step_pre_hooks.values()]
    return [hook for hook in hooks if not isinstance(hook, OwnHook)]


def _post_hooks(optimizer: Optimizer) -> list[Any]:
    return [*optimizer._optimizer_step_post_hooks.values(), *GLOBAL_POST_HOOKS.values()]


def _check_not_replaced(optimizer: Optimizer) -> None:
    """Refuses a `step` that replaces the class's, unless its whole effect is known."""
    replaced = vars(optimizer).get("step")
    if replaced is None:
        return
    # Schedulers of torch note that `step` was called; `finish` does that for them.
    is_scheduler = getattr(replaced, "_wrapped_by_lr_sched", False)
    if not is_scheduler or getattr(replaced, "__wrapped__", None) is not type(optimizer).step:
        raise OptimizerError(
            "`optimizer.step` was replaced by another function.\n"
            "  Blocks are updated by the `step` of the optimizer's class, not by the other function.\n"
            "  Use register_step_pre_hook and register_step_post_hook, or override `step` in a subclass."
        )
