"""Parts: which of several ranks updates which parameters, in memory that all of them share."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import increment_version

from megatrain.base.host_limits import return_free_memory
from megatrain.errors import ExecuteError, OptimizerError
from megatrain.optim.masters.registry import Masters
from megatrain.optim.per_parameter import is_per_parameter
from megatrain.optim.proxy import ALIGNED, Optimizer, attributes, is_same, over_stand_ins, step_code, unnoticed
from megatrain.ranks.landings import Landings
from megatrain.ranks.processes import Ranks
from megatrain.ranks.shared_store import STATE, Name, SharedStore, Twin, unshareable

_STEPS, _EDGE = 2, 4


def why_unshared(optimizer: Optimizer) -> str | None:
    """Returns why ranks can't share an optimizer's state; None if they can.

    The class takes two steps over small corners of a few parameters. State must be tensors: numbers of Python can't be
    shared. Options and attributes must stay as they are, because each rank updates only some of the parameters.
    """
    if not is_per_parameter(optimizer):
        return f"{type(optimizer).__name__} updates all parameters at once"
    chosen = [parameter for group in optimizer.param_groups for parameter in _few(group["params"])]
    try:
        with unnoticed():
            return _reason(optimizer, chosen)
    except OptimizerError:
        raise
    except Exception as error:  # the user's optimizer may raise anything on stand-ins
        return f"{type(optimizer).__name__} can't be tried on small stand-ins ({error})"


def _reason(optimizer: Optimizer, chosen: list[torch.Tensor]) -> str | None:
    stand_ins = {p: torch.nn.Parameter(_corner(p).float(), requires_grad=p.requires_grad) for p in chosen}
    runner = over_stand_ins(optimizer, stand_ins, of_state=_corner)
    kind, before = type(optimizer).__name__, _options(runner)
    generator = torch.Generator().manual_seed(0)
    for _ in range(_STEPS):
        for stand_in in stand_ins.values():
            stand_in.grad = torch.randn(stand_in.shape, generator=generator)
        step_code(type(optimizer))(runner)
    if not is_same(before, _options(runner)):
        return f"{kind} changes its options in a step"
    state: Any = runner.state
    if any(not isinstance(key, torch.Tensor) for key in state):
        return f"{kind} has state that belongs to no parameter"
    for held in state.values():
        for name, value in held.items():
            if unshareable(name, value):
                return f"the state `{name}` of {kind} isn't a plain tensor"
    return None


def _corner(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the first few elements along each dimension; of a tensor on meta zeros on the host."""
    if tensor.is_meta:
        return torch.zeros([min(size, _EDGE) for size in tensor.shape], dtype=tensor.dtype)
    return tensor.detach()[tuple(slice(0, _EDGE) for _ in tensor.shape)].clone()


def _options(runner: Optimizer) -> list[Any]:
    groups = [{name: value for name, value in group.items() if name not in ALIGNED} for group in runner.param_groups]
    return copy.deepcopy([groups, attributes(runner)])


def _few(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """One parameter of each number of dimensions."""
    return list({parameter.dim(): parameter for parameter in parameters}.values())


class Parts:
    """The part of the updates that this rank makes, and those of the other ranks.

    Each parameter has one rank that updates it. A rank that completes due updates on its own, because the user's code
    looks at them, also makes those of others: the rank that first claims a parameter updates it, and all others wait.

    While a parameter is updated, it and its moments use the memory that all ranks see; at all other times the memory
    where this rank's user writes on its own.

    Args:
        ranks: All of them.
        store: What they share.
        optimizers: In the order of their steps.
        masters: Of the parameters.
    """

    def __init__(self, ranks: Ranks, store: SharedStore, optimizers: Sequence[Optimizer], masters: Masters):
        self._ranks, self._store, self._masters = ranks, store, masters
        self._kinds = {store.kind_of(optimizer): optimizer for optimizer in optimizers}
        self._keys: dict[torch.Tensor, str] = {}
        self._parameters: dict[str, torch.Tensor] = {}
        self._updated: set[torch.Tensor] = set()
        self._process = os.getpid()
        self._using = 0

    def know(self, parameters: Mapping[str, torch.Tensor], blocks: Iterable[Iterable[str]]) -> None:
        """Notes the model's parameters by key, and gives those of blocks that have no rank yet to one."""
        self._parameters = dict(parameters)
        self._keys = {parameter: key for key, parameter in parameters.items()}
        self._store.deal({key: parameters[key].nbytes for key in block} for block in blocks)

    def is_mine(self, key: str) -> bool:
        """Whether this rank updates a parameter."""
        return self._store.owners.get(key) == self._ranks.rank

    def begin(self) -> None:
        """Notes that the next update of all parameters begins, with the gradients of the present step."""
        self._store.number += 1
        self._using = self._ranks.count
        self._updated.clear()

    def keep(self, parameter: torch.Tensor, gradient: torch.Tensor, landings: Landings) -> torch.Tensor:
        """Puts a whole gradient where all ranks find it; returns it there."""
        owned, gradient = landings.place_of(parameter, gradient)
        self._store.show(self._keys[parameter], self._ranks.count, owned)
        return gradient

    @contextmanager
    def updating(
        self, held: Collection[torch.Tensor], gradients: Mapping[torch.Tensor, torch.Tensor], others: Landings | None
    ) -> Generator[dict[torch.Tensor, torch.Tensor]]:
        """Updates some parameters in its body.

        Args:
            held: Parameters of a block.
            gradients: Of this rank's part.
            others: Has the gradients of other ranks' parts, which are updated as well unless these have begun; None
                leaves them out.

        Yields:
            The gradients of the parameters to update.

        Raises:
            ExecuteError: In a forked process, which would update what its parent goes on with.
        """
        if os.getpid() != self._process:
            raise ExecuteError(
                "updates are due, and a forked process can't make them.\n"
                "  Ranks share the parameters, so that all of them would see the update.\n"
                "  Call flush() on the TrainStep before you fork."
            )
        keys = [self._keys[p] for p in held if self._keys[p] in self._store.owners]
        own = [key for key in keys if self.is_mine(key)]
        shown = {key: self._store.shown(key, self._using) for key in keys if others is not None}
        found = {p: gradients[p] for p in held if p in gradients}
        claimed = self._store.claim([*own, *(key for key, at in shown.items() if at is not None and key not in own)])
        chosen = {self._parameters[key]: shown.get(key) for key in claimed}
        try:
            try:
                self._store.hear(self._parameters)
                for parameter, owned in chosen.items():
                    self._lend(parameter)
                    if parameter not in found and owned is not None and others is not None:
                        found[parameter] = others.gradient_at(owned, parameter)
                yield {p: found[p] for p in chosen if p in found}
            finally:
                self._take_back(chosen)
        except BaseException:
            self._store.give_back(claimed)
            raise
        self._updated |= chosen.keys()
        self._store.finish(claimed)

    def wait(self, held: Collection[torch.Tensor], go_on: Callable[[], object], *, gives_up: bool) -> bool:
        """Waits until all ranks have updated their parts of some parameters; these are as if they were updated here.

        Args:
            held: The parameters.
            go_on: Called now and then; raises an error to give the wait up.
            gives_up: See `Exchange.wait`.

        Raises:
            RanksError: If another rank can't go on.
        """
        left: dict[str, bool] = {}

        def is_over() -> bool:
            nonlocal left
            left = self._store.left([self._keys[p] for p in held if self._keys[p] in self._store.owners])
            return not left or (gives_up and any(left.values()))

        self._ranks.wait_until(is_over, go_on)
        if left:
            return False
        self._store.hear(self._parameters)
        for parameter in held:
            if parameter not in self._updated:
                self._updated.add(parameter)
                self._note_update(parameter)
        return True

    def _note_update(self, parameter: torch.Tensor) -> None:
        for _, twin in self._twins(parameter):
            if twin.is_written:
                twin.drop()  # all ranks wrote the same before the update
        if not parameter.is_inference():
            increment_version(parameter)
        self._masters.wrote(parameter)

    def _twins(self, parameter: torch.Tensor) -> list[tuple[Name, Twin]]:
        """A parameter, unless it has no elements, and its moments."""
        key, twins = self._keys[parameter], self._store.twins
        states = {kind: optimizer.state.get(parameter, {}) for kind, optimizer in self._kinds.items()}
        names = [Name(STATE, key), *(Name(kind, key, what) for kind, state in states.items() for what in state)]
        return [(name, twins[name]) for name in names if name in twins]

    # -- memory --------------------------------------------------------------------------------------------

    def _lend(self, parameter: torch.Tensor) -> None:
        """Lets a parameter and its moments use the memory that all ranks see."""
        for name, twin in self._twins(parameter):
            twin.take_in()
            if name.kind == STATE:
                self._masters.move(parameter, twin.shared)
            elif self._store.holds(name, self._kinds[name.kind].state[parameter][name.what]):
                self._kinds[name.kind].state[parameter][name.what] = twin.shared

    def _take_back(self, parameters: Iterable[torch.Tensor]) -> None:
        """The reverse. New moments, and those that the update has put in place of others, go where all see them."""
        for parameter in parameters:
            if (twin := self._store.twins.get(Name(STATE, self._keys[parameter]))) is not None:
                self._masters.move(parameter, twin.private)
        num_twins = len(self._store.twins)
        for optimizer in self._kinds.values():
            self._store.place_moments(optimizer, {self._keys[p]: p for p in parameters})
        if len(self._store.twins) > num_twins:
            return_free_memory()  # between new moments that stay others are gone
