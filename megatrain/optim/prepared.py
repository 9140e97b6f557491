"""PreparedBlock: the update of a block by one call into C, looked up once and compared in each step; FastGroups."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_, methodcaller
from typing import Any

import torch
from torch.autograd.graph import increment_version

from megatrain.optim.fast import FastPath, fast_path
from megatrain.optim.fast.path import PreparedUpdate
from megatrain.optim.masters.registry import Masters
from megatrain.optim.proxy import Members, Optimizer

Kind = tuple[int, bool]
"""By what a fast path is chosen: the number of a group, and whether the parameter is its own master."""
Form = tuple[torch.dtype, torch.layout, torch.Size, tuple[int, ...]]
"""A dtype, a layout, a shape and strides; no strides of tensors that aren't dense."""
_NONE: Mapping[str, Any] = {}
_address = methodcaller("data_ptr")


def form_of(gradient: torch.Tensor) -> Form:
    """Reads the form of a gradient."""
    strides = gradient.stride() if gradient.layout == torch.strided else ()
    return gradient.dtype, gradient.layout, gradient.shape, strides


class FastGroups:
    """The fast path of each param group in a step, and the options of the step; asked for once a step.

    Args:
        optimizer: The user's.
        groups: Its groups as they were when the step began.
        members: Their parameters.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], members: Members):
        self._optimizer, self._groups, self.members = optimizer, groups, members
        self._known: dict[Kind, tuple[FastPath, Any] | None] = {}

    def at(self, kind: Kind) -> tuple[FastPath, Any] | None:
        """Returns the fast path of some parameters of a group, and the group's options; None if there is no path."""
        if kind not in self._known:
            group = self._groups[kind[0]]
            path = fast_path(self._optimizer, group, is_whole=kind[1])
            self._known[kind] = None if path is None else (path, path.options(group))
        return self._known[kind]

    def of(self, parameter: torch.Tensor, *, is_whole: bool) -> tuple[FastPath, Any] | None:
        """Returns the fast path of a parameter and the options of its group; None if its own code updates it."""
        group = self.members.group_of.get(id(parameter))
        return None if group is None else self.at((group, is_whole))


@dataclass(frozen=True, slots=True, eq=False)
class AsItWas:
    """Of one parameter, what has to be as it was when the update was prepared; no tensor is kept alive.

    Args:
        kind: Its group, and whether the master is the parameter.
        is_scaled: Whether the step's scale concerns it.
        state: The tensors of its state, in the order of the fast path's numbers and then of its moments.
        addresses: Of these.
        gradient: The dtype, layout, shape and strides of its gradients.
    """

    kind: Kind
    is_scaled: bool
    state: Sequence[weakref.ref[torch.Tensor]]
    addresses: Sequence[int]
    gradient: Form


class PreparedBlock:
    """The update of a block's parameters by one fast path that is sure to reach its end.

    The thread that launches waits for Python of the host's. So this looks up as little as it can, of each tensor what
    shows that somebody has exchanged or written it; and of all parameters at once, as calls cost more than loops of C.

    Args:
        path: The fast path of all of them.
        masters: Theirs.
        parameters: The block's; the same list each time.
        known: What must hold of each; None for one that had no gradient.
        members: Of the groups when the update was prepared.
        update: Updates those that have one.
    """

    def __init__(
        self,
        path: FastPath,
        masters: Masters,
        parameters: Sequence[torch.Tensor],
        known: Sequence[AsItWas | None],
        members: Members,
        update: PreparedUpdate,
    ):
        self._path, self._masters, self._parameters, self._update = path, masters, parameters, update
        self._has_gradient = [each is not None for each in known]
        self._trained = [p for p, each in zip(parameters, known, strict=True) if each is not None]
        self._stamps = masters.stamps(self._trained)
        found = [each for each in known if each is not None]
        self._kinds, self._members = [each.kind for each in found], members
        self._is_scaled = [each.is_scaled for each in found]
        self._names = (*path.numbers, *path.moments)
        self._state = [ref for each in found for ref in each.state]
        self._addresses = [address for each in found for address in each.addresses]
        self._forms = [each.gradient for each in found]

    def run(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        groups: FastGroups,
        states: Mapping[torch.Tensor, Any],
        scale: float,
    ) -> bool:
        """Runs the update, unless something isn't as it was.

        Whatever the update reads is compared with what it was: other memory, other state, a write to a parameter by
        other code, a gradient of another kind. Then the block is to be updated as if for the first time.

        Args:
            parameters: The block's.
            gradients: Of each.
            groups: Of the step.
            states: The optimizer's.
            scale: The step's.

        Returns:
            Whether it has run; otherwise nothing is written.
        """
        if parameters is not self._parameters or [g is not None for g in gradients] != self._has_gradient:
            return False
        if groups.members is not self._members and not self._follow(groups.members):
            return False
        found = {kind: groups.at(kind) for kind in {*self._kinds}}
        options = {kind: fast[1] for kind, fast in found.items() if fast is not None and fast[0] is self._path}
        if len(options) < len(found) or self._masters.stamps(self._trained) != self._stamps:
            return False
        state = self._present(states)
        given = [gradient for gradient in gradients if gradient is not None]
        # The latest tensors may have other strides by now: their `data` may have been set.
        if state is None or [form_of(gradient) for gradient in given] != self._forms:
            return False
        try:
            scales = [scale if is_scaled else 1.0 for is_scaled in self._is_scaled]
            self._update(given, [options[kind] for kind in self._kinds], scales)
        finally:
            written = [*self._trained]
            for number in range(len(self._path.numbers)):
                written += state[number :: len(self._names)]
            increment_version(written)
            self._masters.wrote_in_place(self._trained)
        return True

    def _present(self, states: Mapping[torch.Tensor, Any]) -> list[torch.Tensor] | None:
        """The tensors of the state of all parameters; None if they aren't those that there were."""
        found = [state.get(name) for p in self._trained for state in (states.get(p, _NONE),) for name in self._names]
        if not all(map(is_, found, [ref() for ref in self._state])):
            return None
        try:
            return found if [*map(_address, found)] == self._addresses else None
        except AttributeError:  # None, in place of a tensor that is gone
            return None

    def _follow(self, members: Members) -> bool:
        """Finds the parameters in other groups; returns whether each is in one."""
        groups = [members.group_of.get(id(parameter)) for parameter in self._trained]
        found = [(group, kind[1]) for group, kind in zip(groups, self._kinds, strict=True) if group is not None]
        if len(found) < len(groups):
            return False
        self._kinds, self._members = found, members
        return True
