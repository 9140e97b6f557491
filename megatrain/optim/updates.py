"""Updates: the gradients of a step on their way to the optimizers, block by block."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from megatrain.base.checks.several_optimizers import parameters_of
from megatrain.errors import ExecuteError
from megatrain.optim.block_update import MasterStep
from megatrain.optim.blockwise import BlockOptimizer, takes_turns
from megatrain.optim.masters.halves import Master
from megatrain.optim.moments import Moments
from megatrain.optim.norm import GradientNorm, NonFinite
from megatrain.optim.proxy import Optimizer, Undo
from megatrain.runtime.exchange import Exchange


@dataclass(slots=True, eq=False)
class Gradients:
    """The whole gradients of one step, on the host.

    Args:
        by_parameter: Gradients that no update has used yet.
        received: The parameters whose gradient has arrived, also if an update has used it.
        norms: Of single gradients, where the device has taken them.
        norm: Of all gradients; None until it is known, or if nobody asks.
        scale: The factor of clipping.
        nonfinite: The first that isn't finite, if somebody looked.
    """

    by_parameter: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict[torch.Tensor, torch.Tensor])
    received: set[torch.Tensor] = field(default_factory=set[torch.Tensor])
    norms: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict[torch.Tensor, torch.Tensor])
    norm: torch.Tensor | None = None
    scale: float = 1.0
    nonfinite: NonFinite | None = None

    def show(self, *, besides: Iterable[torch.Tensor] = ()) -> None:
        """Lets code of the user's see gradients where it looks for them, clipped; except those of some parameters."""
        others = set(besides)
        for parameter, gradient in self.by_parameter.items():
            if parameter not in others and parameter.grad is not gradient:
                # A copy, which the hooks may keep: gradients lie where the next step's will.
                parameter.grad = gradient.clone().mul_(self.scale)

    def take_shown(self) -> None:
        """Reads the gradients back after the hooks."""
        shown: list[tuple[torch.Tensor, torch.Tensor | None]] = [(p, p.grad) for p in self.by_parameter]
        self.by_parameter = {parameter: gradient for parameter, gradient in shown if gradient is not None}
        self.scale = 1.0

    def hide(self) -> None:
        """Takes all of them out of `.grad`."""
        for parameter in self.by_parameter:
            parameter.grad = None


class GradientSource:
    """Where the optimizer's code finds gradients. An object of its own, so that nothing here needs the collector."""

    def __init__(self, known: Mapping[torch.Tensor, int]):
        self.using = Gradients()
        self.chosen: set[torch.Tensor] | None = None  # the only ones to be updated now; None is all
        self._known = known

    def __call__(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Returns the whole gradient of a parameter."""
        if self.chosen is not None and parameter in self._known and parameter not in self.chosen:
            return None
        found = self.using.by_parameter.get(parameter)
        if found is None and parameter not in self._known:
            return parameter.grad  # of a parameter outside the model
        return found


class Updates:
    """Takes whole gradients as they come, their norm, and the steps of the optimizers block by block.

    `receive`, `take_squares` and then `take_norm` fill `arriving`; `begin` makes them those of the optimizers' step,
    which `update` takes for each block in any order and `finish` ends. In between gradients of the next step may
    arrive.

    Several optimizers take their steps side by side: `update` takes a block with each of them, in their order. Hooks
    on steps, and optimizers that update all parameters at once, may look at everything that the optimizers before
    theirs have done: if there are any, each optimizer begins when the one before has ended, all but the first in
    `finish`.

    Args:
        optimizers: The user's, in the order of their steps. No two hold the same parameter.
        blocks: The parameters that are updated with each block.
        masters: Of parameters that have one; see `MasterStep`.
        names: Of the parameters, in the order in which `clip_grad_norm_` would get them.
        max_norm: Largest norm of all gradients; None doesn't clip.
        threads: How many threads a native kernel takes; None is as many as torch.
        norm_threads: See `GradientNorm`.
        exchange: Who else updates parts of the parameters.
        moments: The optimizers' state, if a file has it between updates.

    Attributes:
        has_updated: The latest step has updated a parameter.
        moments: See above.
        sums_squares: Each update sums the squares of its gradients first, so that `take_norm` needs no `take_squares`.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        blocks: Sequence[Sequence[torch.Tensor]],
        *,
        masters: Mapping[torch.Tensor, Master],
        names: Mapping[torch.Tensor, str],
        max_norm: float | None = None,
        threads: int | None = None,
        norm_threads: int | None = None,
        exchange: Exchange | None = None,
        moments: Moments | None = None,
    ):
        self._exchange = Exchange() if exchange is None else exchange
        self.moments = moments
        self._blocks = blocks
        self._block_of = {parameter: index for index, block in enumerate(blocks) for parameter in block}
        self._source = GradientSource(self._block_of)
        self._code = MasterStep(masters, gradient_of=self._source, threads=threads, scaled=self._block_of)
        self._undo = Undo(masters, self._code.cannot_fail)
        self._updaters = [BlockOptimizer(each, blocks, code=self._code, undo=self._undo) for each in optimizers]
        self._names = list(names.values())
        self._norm = GradientNorm(names, masters, threads=norm_threads)
        self._max_norm = max_norm
        self.arriving = Gradients()
        self.has_updated = self.sums_squares = False

    @property
    def is_under_way(self) -> bool:
        """Whether a step has begun and not ended."""
        return any(updater.is_under_way for updater in self._updaters)

    def receive(self, parameter: torch.Tensor, gradient: torch.Tensor, norm: torch.Tensor | None = None) -> None:
        """Takes a whole gradient, and its norm if that is known."""
        self.arriving.by_parameter[parameter] = self._exchange.kept(parameter, gradient)
        self.arriving.received.add(parameter)
        if norm is not None:
            self.arriving.norms[parameter] = norm

    def drop_arriving(self) -> None:
        """Forgets all gradients that have arrived, and those of parameters outside the model that no step waits for."""
        self.arriving = Gradients()
        self._norm.begin()
        for updater in self._updaters if not self.is_under_way else ():
            for parameter in updater.outside:
                parameter.grad = None

    def take_squares(self, parameters: Iterable[torch.Tensor]) -> None:
        """Sums the squares of gradients that have arrived, for the norm of all; others may still be on their way.

        Args:
            parameters: Whose; those that got no gradient are left out.

        Raises:
            OptimizerError: If a gradient is sparse.
        """
        for parameter in parameters:
            if parameter in self.arriving.by_parameter:
                gradient, norm = self.arriving.by_parameter[parameter], self.arriving.norms.get(parameter)
                self._norm.add(
                    self._block_of[parameter], {parameter: gradient}, {} if norm is None else {parameter: norm}
                )

    def take_squares_there(self, parameter: torch.Tensor, gradient: torch.Tensor, norm: torch.Tensor | None) -> None:
        """Takes the norm of a whole gradient that stays on the device, for the norm of all; on any thread.

        Args:
            parameter: Whose.
            gradient: Read only if its norm isn't finite.
            norm: Its norm, fp32, on the host; None of one that isn't dense.

        Raises:
            OptimizerError: If the gradient is sparse.
        """
        if not self._norm.has(parameter):  # a step that failed may come here again
            known = {} if norm is None else {parameter: norm}
            self._norm.add(self._block_of[parameter], {parameter: gradient}, known)

    def take_norm(self) -> None:
        """Takes the norm of all gradients from their squares, and computes the factor of clipping."""
        found = self.arriving
        left = [parameter for parameter in found.received if not self._norm.has(parameter)]
        assert not any(parameter.numel() for parameter in left), "each gradient's squares are summed before"
        self.take_squares(left)  # without an element: a block that has no other has no op for them
        self._norm.hear(self._exchange.norms(self._norm.told()))
        found.norm = self._norm.total()
        found.nonfinite = self._norm.first_nonfinite
        if self._max_norm is not None:
            found.scale = float(self._norm.coefficient(self._max_norm))

    def begin(self) -> None:
        """Starts a step of the optimizers with the gradients that have arrived or will; options are read now.

        Raises:
            OptimizerError: See `BlockOptimizer.begin`.
        """
        assert not self.is_under_way, "a step must end before the next begins"
        self._exchange.begin_updates()
        self.has_updated = False
        self._source.using = self.arriving
        for updater in self._updaters:
            updater.wait()
        try:
            self._begin_waiting()
        except BaseException:
            self.abandon()
            raise

    def _begin_waiting(self) -> None:
        """Begins the steps whose turn has come: all that wait, or the first of them."""
        waiting = [updater for updater in self._updaters if updater.is_waiting]
        has_hooks = any(updater.has_hooks for updater in waiting)
        in_turn = any(takes_turns(updater.optimizer) for updater in waiting)
        try:
            if has_hooks:
                self._source.using.show()
            for updater in waiting[:1] if in_turn else waiting:
                updater.begin()
        except BaseException:
            self._source.using.hide()
            raise
        if has_hooks:
            self._source.using.take_shown()
        self._code.scale = self._source.using.scale

    def update(self, block: int, *, takes_over: bool = False) -> None:
        """Updates the parameters of a block, or this process's part, with each optimizer that has begun and hasn't yet.

        If one of them fails, its parameters are as before; only what is left of the block may be tried again.

        Args:
            block: The block.
            takes_over: Other processes' parts as well; see `Exchange.updating`.
        """
        updaters = [updater for updater in self._updaters if updater.has_begun and block in updater.left]
        assert updaters, f"block {block} has no update left"
        if self.sums_squares:  # but what an update that failed has summed already
            self.take_squares(p for p in self._blocks[block] if not self._norm.has(p))
        if self._exchange.is_alone and self.moments is None:
            self._update(updaters, block, self._source.using.by_parameter)
        else:
            with self._chosen(updaters, block, takes_over=takes_over) as gradients, self._holding(updaters, block):
                self._update(updaters, block, gradients)
        if any(block in updater.left for updater in updaters):
            return  # one that updates all at once needs the gradients in the end
        self._drop(block)

    def _update(
        self, updaters: Sequence[BlockOptimizer], block: int, gradients: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        for updater in updaters:
            self.has_updated |= updater.update(block, gradients)

    @property
    def scale(self) -> float:
        """The factor of all gradients in the step that has begun."""
        return self._code.scale

    def options(self, parameter: torch.Tensor) -> Any:
        """The options of a parameter in the step that has begun, for an update on the device."""
        return next(found for each in self._updaters if (found := each.options(parameter)) is not None)

    def note_updated(self, block: int) -> None:
        """Notes that the device has updated a block of the step that has begun."""
        for updater in self._updaters:
            updater.note_updated(block)

    def _drop(self, block: int) -> None:
        """Lets go of the gradients of a block that is updated."""
        # A hook may look at all gradients until the last optimizer has begun, and after the step.
        if not self._has_waiting and not any(updater.has_hooks for updater in self._updaters):
            for parameter in self._blocks[block]:
                if self._source.using.by_parameter.pop(parameter, None) is not None:
                    parameter.grad = None

    def _holding(self, updaters: Sequence[BlockOptimizer], block: int) -> AbstractContextManager[None]:
        """The body has the optimizers' state of a block in memory."""
        if self.moments is None:
            return nullcontext()
        held = [(updater.optimizer, updater.owned(block)) for updater in updaters]
        return self.moments.holding(block, held, self._source.using.by_parameter)

    @contextmanager
    def _chosen(
        self, updaters: Sequence[BlockOptimizer], block: int, *, takes_over: bool
    ) -> Generator[Mapping[torch.Tensor, torch.Tensor]]:
        """The gradients with which some updaters update a block here, in the body."""
        gradients = self._source.using.by_parameter
        if self._exchange.is_alone:
            yield gradients
            return
        held = [p for updater in updaters for p in updater.owned(block)]
        with self._exchange.updating(held, gradients, takes_over=takes_over) as found:
            gradients.update(found)
            self._source.chosen = set(found)
            try:
                yield found
            finally:
                self._source.chosen = None

    def wait(self, block: int, go_on: Callable[[], object], *, is_of_before: bool) -> None:
        """Waits until all processes have updated their parts of a block.

        Args:
            block: The block.
            go_on: Called now and then; raises an error to give the wait up.
            is_of_before: The update is one of the step before, so that processes may still go back to its end.

        Raises:
            ExecuteError: If such an update failed elsewhere.
        """
        if not self._exchange.wait(self._begun(block), go_on, gives_up=is_of_before):
            raise ExecuteError(
                f"another rank has failed to update its part of block {block}.\n"
                "  Ranks share the parameters, and each updates a part of them.\n  The other rank says why."
            )

    def _begun(self, block: int) -> set[torch.Tensor]:
        """The parameters of a block that optimizers hold whose steps have begun."""
        return {p for updater in self._updaters if updater.has_begun for p in updater.owned(block)}

    def _wait_or_take_over(self, block: int) -> None:
        """Waits until all processes have updated their parts; makes updates that have failed elsewhere."""
        while not self._exchange.wait(self._begun(block), lambda: None, gives_up=True):
            for updater in self._updaters:
                if updater.has_begun:
                    updater.reopen(block)
            self.update(block, takes_over=True)

    def finish(self) -> None:
        """Runs the rest of the optimizers' steps, and ends them."""
        try:
            self._finish_begun()
            while self._has_waiting:
                self._begin_waiting()
                self._finish_begun()
        finally:
            if not self.is_under_way:  # a hook after the last update may have failed
                self._source.using.hide()
                self._source.using = Gradients()
                for parameter in self._parameters():
                    parameter.grad = None

    def _finish_begun(self) -> None:
        for block in sorted({block for updater in self._updaters if updater.has_begun for block in updater.left}):
            self.update(block, takes_over=True)
        for block in range(0 if self._exchange.is_alone else len(self._blocks)):
            self._wait_or_take_over(block)
        for updater in self._updaters:
            if updater.has_begun:
                if updater.is_at_once:  # its code may look at gradients of others, too
                    self._source.using.show(besides=parameters_of(updater.optimizer))
                self.has_updated |= updater.update_rest()
                updater.finish()

    @property
    def _has_waiting(self) -> bool:
        return any(updater.is_waiting for updater in self._updaters)

    def abandon(self) -> None:
        """Ends the optimizers' step without a further update; see `BlockOptimizer.abandon`."""
        for updater in self._updaters:
            updater.abandon()
        self._source.using.hide()
        self._source.using = Gradients()

    def _parameters(self) -> list[torch.Tensor]:
        return parameters_of(*(updater.optimizer for updater in self._updaters))

    @property
    def due(self) -> list[int]:
        """The blocks whose parameters are not updated yet by all optimizers."""
        return sorted({block for updater in self._updaters for block in updater.left if self._blocks[block]})

    def changing(self) -> Iterable[torch.Tensor]:
        """The parameters and optimizer state that the remaining updates will change."""
        gradients = self._source.using.by_parameter
        for updater in self._updaters:
            held = (p for block in sorted(updater.left) for p in updater.owned(block))
            for parameter in (p for p in held if p in gradients or not self._exchange.is_alone):
                yield parameter
                state = updater.optimizer.state.get(parameter, {})
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def describe_nonfinite(self) -> str:
        """Names the first of the gradients that arrived which isn't finite."""
        found = self.arriving.nonfinite
        assert found is not None
        return f"the gradient of `{self._names[found.parameter]}`, of block {found.block},"
