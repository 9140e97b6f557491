"""PreparedBlock: a block's update by a fast path, looked up once and run in later steps as long as it still holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version

from megatrain.optim.fast import FastPath, ParameterUpdate, fast_path
from megatrain.optim.fast.path import PreparedUpdate
from megatrain.optim.masters.halves import WholeMaster, in_memory, memory_order
from megatrain.optim.masters.registry import Masters, Stamp
from megatrain.optim.proxy import Optimizer

GradientOf = Callable[[torch.Tensor], torch.Tensor | None]


class FastGroups:
    """The fast path of each param group in a step, and the options of the step; asked for once a step.

    Args:
        optimizer: The user's.
        groups: Its groups as they were when the step began.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]):
        self._optimizer, self._groups = optimizer, groups
        self._group_of: dict[int, int | None] = {}
        for index, group in enumerate(groups):
            for parameter in group["params"]:
                is_twice = id(parameter) in self._group_of  # torch updates it twice
                self._group_of[id(parameter)] = None if is_twice else index
        self._known: dict[tuple[int, bool], tuple[FastPath, Any] | None] = {}

    def of(self, parameter: torch.Tensor, *, is_whole: bool) -> tuple[FastPath, Any] | None:
        """Returns the fast path of a parameter and the options of its group; None if its own code updates it."""
        index = self._group_of.get(id(parameter))
        if index is None:
            return None
        key = index, is_whole
        if key not in self._known:
            group = self._groups[index]
            path = fast_path(self._optimizer, group, is_whole=is_whole)
            self._known[key] = None if path is None else (path, path.options(group))
        return self._known[key]


@dataclass(frozen=True, slots=True, eq=False)
class _Parameter:
    """Of one parameter, what has to be as it was when the update was prepared; no tensor is kept alive.

    Args:
        stamp: Of its master.
        is_whole: The master is the parameter.
        state: The tensors of its state, by name, and their addresses.
        gradient: The dtype and strides of its gradient.
        is_scaled: Whether the step's scale concerns it.
    """

    stamp: Stamp
    is_whole: bool
    state: Sequence[tuple[str, weakref.ref[torch.Tensor], int]]
    gradient: tuple[torch.dtype, tuple[int, ...]]
    is_scaled: bool

    def holds(self, state: Mapping[str, Any], gradient: torch.Tensor) -> bool:
        if gradient.layout != torch.strided or (gradient.dtype, gradient.stride()) != self.gradient:
            return False
        for name, known, address in self.state:
            tensor = known()
            if tensor is None or state.get(name) is not tensor or tensor.data_ptr() != address:
                return False
        return True


class PreparedBlock:
    """The update of a block's parameters by one fast path that is sure to reach its end.

    Whatever the update reads is compared with what it was when the update was prepared: other memory, other state, a
    write to a parameter by other code, a gradient of another kind. Then the block is updated as if for the first time.

    Args:
        path: The fast path of all of them.
        parameters: The block's, in order, with what must hold; None for one that had no gradient.
        update: Updates those that have one.
        masters: Of the parameters.
        gradient_of: Returns a parameter's gradient.
    """

    def __init__(
        self,
        path: FastPath,
        parameters: Sequence[tuple[int, _Parameter | None]],
        update: PreparedUpdate,
        masters: Masters,
        gradient_of: GradientOf,
    ):
        self._path, self._parameters, self._update = path, parameters, update
        self._masters, self._gradient_of = masters, gradient_of

    @classmethod
    def of(
        cls,
        parameters: Sequence[torch.Tensor],
        groups: FastGroups,
        states: Mapping[torch.Tensor, Mapping[str, Any]],
        masters: Masters,
        gradient_of: GradientOf,
        is_scaled: Callable[[torch.Tensor], bool],
        threads: int | None,
    ) -> PreparedBlock | None:
        """Prepares the next update of parameters that have just been updated; None if that can't be."""
        found: list[tuple[int, _Parameter | None]] = []
        given: list[ParameterUpdate] = []
        paths: list[FastPath] = []
        for parameter in parameters:
            gradient = gradient_of(parameter)
            if gradient is None:
                found.append((id(parameter), None))
                continue
            master, (stamp,) = masters.get(parameter), masters.stamps([parameter])
            if master is None or stamp is None or parameter.is_inference():
                return None
            fast, order = groups.of(parameter, is_whole=isinstance(master, WholeMaster)), memory_order(parameter)
            if fast is None or gradient.layout != torch.strided or gradient.shape != parameter.shape:
                return None
            path, options = fast
            state, flat = states[parameter], in_memory(gradient, order)
            if not flat.is_contiguous():
                return None
            moments = tuple(in_memory(state[name], order) for name in path.moments)
            numbers = tuple(state[name] for name in path.numbers)
            given.append(ParameterUpdate(master, flat, moments, numbers, options, 1.0, threads))
            paths.append(path)
            names = (*path.moments, *path.numbers)
            one = _Parameter(
                stamp,
                isinstance(master, WholeMaster),
                [(name, weakref.ref(state[name]), state[name].data_ptr()) for name in names],
                (gradient.dtype, gradient.stride()),
                is_scaled(parameter),
            )
            found.append((id(parameter), one))
        if not given or any(path is not paths[0] for path in paths):
            return None
        update = paths[0].prepare(given)
        return None if update is None else cls(paths[0], found, update, masters, gradient_of)

    def run(
        self,
        parameters: Sequence[torch.Tensor],
        groups: FastGroups,
        states: Mapping[torch.Tensor, Mapping[str, Any]],
        scale: float,
    ) -> bool:
        """Updates the parameters, unless something isn't as it was.

        Returns:
            Whether it has; otherwise nothing is written.
        """
        if len(parameters) != len(self._parameters):
            return False
        gradients: list[torch.Tensor] = []
        options: list[Any] = []
        scales: list[float] = []
        written: list[torch.Tensor] = []
        updated: list[torch.Tensor] = []
        path, gradient_of, numbers, stamps = self._path, self._gradient_of, self._path.numbers, self._masters.stamps
        for parameter, stamp, (identity, known) in zip(parameters, stamps(parameters), self._parameters, strict=True):
            gradient = gradient_of(parameter)
            if id(parameter) != identity or (gradient is None) != (known is None):
                return False
            if gradient is None or known is None:
                continue
            state, fast = states.get(parameter), groups.of(parameter, is_whole=known.is_whole)
            if fast is None or fast[0] is not path or stamp != known.stamp or state is None:
                return False
            if gradient.shape != parameter.shape or not known.holds(state, gradient):
                return False
            gradients.append(gradient)
            options.append(fast[1])
            scales.append(scale if known.is_scaled else 1.0)
            updated.append(parameter)
            written.append(parameter)
            for name in numbers:
                written.append(state[name])
        try:
            self._update(gradients, options, scales)
        finally:
            increment_version(written)
            for parameter in updated:
                self._masters.wrote(parameter)
        return True
