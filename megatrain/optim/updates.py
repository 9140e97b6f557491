"""Updates: the gradients of a step on their way to the optimizer, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.optim.block_update import MasterStep
from megatrain.optim.blockwise import BlockOptimizer
from megatrain.optim.impostor import Optimizer
from megatrain.optim.masters.halves import Master
from megatrain.optim.norm import GradientNorm, NonFinite
from megatrain.optim.undo import Undo
from megatrain.torch_private import pytree


@dataclass(slots=True, eq=False)
class Gradients:
    """The whole gradients of one step, on the host.

    Args:
        by_parameter: Gradients that no update has used yet.
        arrivals: Each parameter and its block, in the order in which they came.
        norm: Of all gradients; None until it is known, or if nobody asks.
        scale: The factor of clipping.
        nonfinite: The first that isn't finite, if somebody looked.
    """

    by_parameter: dict[torch.Tensor, torch.Tensor]
    arrivals: list[tuple[int, torch.Tensor]]
    norm: torch.Tensor | None = None
    scale: float = 1.0
    nonfinite: NonFinite | None = None

    @staticmethod
    def none() -> Gradients:
        """Returns those of a step that begins."""
        return Gradients({}, [])


class _Source:
    """Where the optimizer's code finds gradients. An object of its own, so that nothing here needs the collector."""

    def __init__(self, known: Mapping[torch.Tensor, int]):
        self.using = Gradients.none()
        self._known = known

    def __call__(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Returns the whole gradient of a parameter."""
        found = self.using.by_parameter.get(parameter)
        if found is None and parameter not in self._known:
            return parameter.grad  # of a parameter outside the model
        return found


class Updates:
    """Takes whole gradients as they come, their norm, and the optimizer's step block by block.

    `receive` and then `take_norm` fill `arriving`; `begin` makes them those of the optimizer's step, which `update`
    takes for each block in any order and `finish` ends. In between gradients of the next step may arrive.

    Args:
        optimizer: The user's.
        blocks: The parameters that are updated with each block.
        masters: Of parameters that have one; see `MasterStep`.
        names: Of the parameters, in the order in which `clip_grad_norm_` would get them.
        max_norm: Largest norm of all gradients; None doesn't clip.
        threads: How many threads a native kernel takes; None is as many as torch.
        norm_threads: See `GradientNorm`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        blocks: Sequence[Sequence[torch.Tensor]],
        *,
        masters: Mapping[torch.Tensor, Master],
        names: Mapping[torch.Tensor, str],
        max_norm: float | None = None,
        threads: int | None = None,
        norm_threads: int | None = None,
    ):
        self._optimizer = optimizer
        self._undo = Undo(optimizer, masters)
        self._block_of = {parameter: index for index, block in enumerate(blocks) for parameter in block}
        self._source = _Source(self._block_of)
        self._code = MasterStep(masters, gradient_of=self._source, threads=threads)
        self.blocks = BlockOptimizer(optimizer, blocks, code=self._code, probe=False)
        self._names = list(names.values())
        self._norm = GradientNorm(names, masters, threads=norm_threads)
        self._max_norm = max_norm
        self.arriving = Gradients.none()
        self._left: set[int] = set()

    @property
    def is_under_way(self) -> bool:
        """Whether a step of the optimizer has begun and not ended."""
        return self.blocks.is_under_way

    @property
    def is_whole(self) -> bool:
        """Whether such a step has not updated anything yet."""
        return self.is_under_way and len(self._left) == len(self.blocks)

    def receive(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Takes a whole gradient."""
        self.arriving.by_parameter[parameter] = gradient
        self.arriving.arrivals.append((self._block_of[parameter], parameter))

    def drop_arriving(self) -> None:
        """Forgets all gradients that have arrived, and those of parameters outside the model."""
        self.arriving = Gradients.none()
        for parameter in self._parameters():
            if parameter not in self._block_of:
                parameter.grad = None

    def take_norm(self) -> None:
        """Takes the norm of the gradients that have arrived, and computes the factor of clipping.

        Raises:
            OptimizerError: If a gradient is sparse.
        """
        found = self.arriving
        self._norm.begin()
        with self._norm.summing():
            for block, parameter in found.arrivals:
                self._norm.add(block, {parameter: found.by_parameter[parameter]})
        found.norm = self._norm.total()
        found.nonfinite = self._norm.first_nonfinite
        if self._max_norm is not None:
            found.scale = float(self._norm.coefficient(self._max_norm))

    def begin(self) -> None:
        """Starts a step of the optimizer with the gradients that have arrived or will; options are read now.

        Raises:
            OptimizerError: See `BlockOptimizer.begin`.
        """
        has_hooks = self.blocks.has_hooks
        try:
            if has_hooks:
                self._show_gradients()
            self.blocks.begin()
        except BaseException:
            _hide_gradients(self.arriving)
            raise
        if has_hooks:
            self._take_shown_gradients()
        self._source.using = self.arriving
        self._code.scale = self._source.using.scale
        self._left = set(range(len(self.blocks)))

    def _show_gradients(self) -> None:
        """Lets hooks before the step see gradients where they look for them, clipped."""
        found = self.arriving
        for parameter, gradient in found.by_parameter.items():
            # A copy, which the hooks may keep: gradients lie where the next step's will.
            parameter.grad = found.by_parameter[parameter] = gradient.clone().mul_(found.scale)
        found.scale = 1.0

    def _take_shown_gradients(self) -> None:
        """Reads the gradients back after the hooks."""
        shown: list[tuple[torch.Tensor, torch.Tensor | None]] = [(p, p.grad) for p in self.arriving.by_parameter]
        self.arriving.by_parameter = {parameter: gradient for parameter, gradient in shown if gradient is not None}

    def update(self, block: int) -> None:
        """Updates the parameters of a block. If that fails they are as before, and it may be tried again."""
        owned = [p for p in self.blocks.owned(block) if p in self._source.using.by_parameter]
        can_fail = bool(owned) and not self._code.cannot_fail(self._optimizer, owned)
        if can_fail:
            self._undo.note(owned)
        try:
            self.blocks.update(block)
        except BaseException:
            if can_fail:
                self._undo.restore()
            raise
        for parameter in owned:
            _own(self._optimizer.state.get(parameter, {}), self._source.using.by_parameter.pop(parameter))
            parameter.grad = None
        self._left.remove(block)

    def finish(self) -> None:
        """Runs the rest of the optimizer's step, and ends it."""
        for block in sorted(self._left):
            self.update(block)
        self._code.scale = 1.0  # the remaining parameters are outside the model, and weren't clipped with it
        self.blocks.finish()
        self._source.using = Gradients.none()
        for parameter in self._parameters():
            parameter.grad = None

    def abandon(self) -> None:
        """Ends the optimizer's step without an update; see `BlockOptimizer.abandon`."""
        self.blocks.abandon()
        _hide_gradients(self._source.using)
        self._source.using = Gradients.none()
        self._left.clear()

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    @property
    def due(self) -> list[int]:
        """The blocks whose update is not taken yet."""
        return sorted(self._left)

    def changing(self) -> Iterable[torch.Tensor]:
        """The parameters and optimizer state that the remaining updates will change."""
        for block in self.due:
            for parameter in self.blocks.owned(block) & self._source.using.by_parameter.keys():
                yield parameter
                yield from (v for v in self._optimizer.state.get(parameter, {}).values() if isinstance(v, torch.Tensor))

    def describe_nonfinite(self) -> str:
        """Names the first of the gradients that arrived which isn't finite."""
        found = self.arriving.nonfinite
        assert found is not None
        return f"the gradient of `{self._names[found.parameter]}`, of block {found.block},"


def _own(state: dict[Any, Any], gradient: torch.Tensor) -> None:
    """Copies what an optimizer kept of a gradient by reference: its memory will be that of the next step's."""
    if gradient.layout != torch.strided:
        return
    place = gradient.untyped_storage().data_ptr()

    def own(value: Any) -> Any:
        is_kept = isinstance(value, torch.Tensor) and value.layout == torch.strided
        return value.clone() if is_kept and value.untyped_storage().data_ptr() == place else value

    for name, value in state.items():
        state[name] = pytree.tree_map(own, value)


def _hide_gradients(found: Gradients) -> None:
    for parameter in found.by_parameter:
        parameter.grad = None
