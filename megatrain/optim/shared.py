"""Division: which of several ranks updates which parameters."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.autograd.graph import increment_version

from megatrain.device import is_on_host
from megatrain.errors import ExecuteError, OptimizerError
from megatrain.memory.host_limits import return_free_memory
from megatrain.optim.masters.registry import Masters
from megatrain.optim.per_parameter import is_per_parameter
from megatrain.optim.proxy import ALIGNED, Optimizer, attributes, is_same, over_stand_ins, step_code, unnoticed
from megatrain.ranks.signs_of_life import wait_until
from megatrain.runtime.stores.shared_store import STATE, Name, SharedStore
from megatrain.tracer.packing import is_wrapper


def rank_of_each(blocks: Sequence[Sequence[int]], num_ranks: int) -> list[list[int]]:
    """Gives each parameter to one rank, the largest of a block first, each to the rank that has the least so far.

    The ranks' shares differ by no more than the largest parameter.

    Args:
        blocks: Bytes of the parameters of each block, in the order in which blocks are updated.
        num_ranks: How many ranks there are.

    Returns:
        The rank of each parameter.

    >>> rank_of_each([[4, 4], [1, 9]], 2)
    [[0, 1], [1, 0]]
    """
    shares = [0] * num_ranks
    found: list[list[int]] = []
    for block in blocks:
        ranks = [0] * len(block)
        for index in sorted(range(len(block)), key=lambda index: -block[index]):
            ranks[index] = min(range(num_ranks), key=shares.__getitem__)
            shares[ranks[index]] += block[index]
        found.append(ranks)
    return found


_STEPS = 2


def unshareable(optimizer: Optimizer) -> str | None:
    """Returns why ranks can't share an optimizer's state; None if they can.

    The class takes two steps over small corners of a few parameters. State must be tensors: numbers of Python can't be
    shared. Options and attributes must stay as they are, because each rank updates only some of the parameters.
    """
    if not is_per_parameter(optimizer):
        return f"{type(optimizer).__name__} updates all parameters at once"
    chosen = [parameter for group in optimizer.param_groups for parameter in _few(group["params"])]
    try:
        with unnoticed():
            return with_gradients_it_takes(optimizer, lambda sparse: _reason(optimizer, chosen, sparse=sparse))
    except OptimizerError:
        raise
    except Exception as error:  # the user's optimizer may raise anything on stand-ins
        return f"{type(optimizer).__name__} can't be tried on small stand-ins ({error})"


def _reason(optimizer: Optimizer, chosen: list[torch.Tensor], *, sparse: bool) -> str | None:
    stand_ins = {p: torch.nn.Parameter(corner(p).float(), requires_grad=p.requires_grad) for p in chosen}
    runner = over_stand_ins(optimizer, stand_ins, of_state=corner)
    kind, before = type(optimizer).__name__, _options(runner)
    generator = torch.Generator().manual_seed(0)
    for _ in range(_STEPS):
        for stand_in in stand_ins.values():
            stand_in.grad = random_gradient(stand_in, generator, sparse=sparse)
        step_code(type(optimizer))(runner)
    if not is_same(before, _options(runner)):
        return f"{kind} changes its options in a step"
    state: Any = runner.state
    if any(not isinstance(key, torch.Tensor) for key in state):
        return f"{kind} has state that belongs to no parameter"
    for held in state.values():
        for name, value in held.items():
            if unshareable_value(name, value):
                return f"the state `{name}` of {kind} isn't a plain tensor"
    return None


def unshareable_value(name: Any, value: Any) -> bool:
    """Whether a part of a parameter's state can't be shared."""
    is_plain = isinstance(value, torch.Tensor) and not is_wrapper(value) and value.layout == torch.strided
    return not (is_plain and isinstance(name, str) and is_on_host(value))


def _options(runner: Optimizer) -> list[Any]:
    groups = [{name: value for name, value in group.items() if name not in ALIGNED} for group in runner.param_groups]
    return copy.deepcopy([groups, attributes(runner)])


def _few(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """One parameter of each number of dimensions."""
    return list({parameter.dim(): parameter for parameter in parameters}.values())


POLL_S = 0.001
"""How often a rank looks whether the others have made their updates."""
GoOn = Callable[[], object]


class OtherFailedError(ExecuteError):
    """An update of the step before failed on another rank and left no trace, so that any rank may make it."""


class HostParts:
    """The parts of the updates that this rank makes, and those of the other ranks of its host.

    Each parameter has one rank that updates it in a step. A rank that completes due updates on its own, because the
    user's code looks at them, also makes those of others: the rank that first claims a parameter updates it,
    and all others wait.

    While a parameter is updated, it and its moments use the memory that all ranks see; at all other times the memory
    where this rank's user writes on its own.

    Args:
        store: What the ranks share.
        optimizers: In the order of their steps.
        masters: Of the parameters.
        blocks: The parameters that are updated with each block, by any optimizer.
        keys: Of the parameters, as the store has them.
        look: Raises an error if a rank can't go on.
    """

    def __init__(
        self,
        store: SharedStore,
        optimizers: Sequence[Optimizer],
        masters: Masters,
        blocks: Sequence[Sequence[torch.Tensor]],
        keys: Mapping[torch.Tensor, str],
        look: Callable[[], None],
    ):
        self._store, self._masters, self._keys, self._look = store, masters, keys, look
        self._kinds = {store.kind_of(optimizer): optimizer for optimizer in optimizers}
        self._parameters = {key: parameter for parameter, key in self._keys.items()}
        ranks = rank_of_each([[p.nbytes for p in block] for block in blocks], store.host.size)
        pairs = zip(blocks, ranks, strict=True)
        self._rank_of = {p: rank for block, of in pairs for p, rank in zip(block, of, strict=True)}
        self._updated: set[torch.Tensor] = set()
        self._process = os.getpid()

    def begin(self) -> None:
        """Notes that the next update of all parameters begins."""
        self._store.number += 1
        self._updated.clear()

    @contextmanager
    def updating(self, parameters: Iterable[torch.Tensor], *, takes_over: bool) -> Generator[set[torch.Tensor]]:
        """Updates some parameters in its body.

        Args:
            parameters: Those that have an update left.
            takes_over: Those of other ranks as well, unless these have begun.

        Yields:
            The parameters to update.

        Raises:
            ExecuteError: In a forked process, which would update what its parent goes on with.
        """
        if os.getpid() != self._process:
            raise ExecuteError(
                "updates are due, and a forked process can't make them.\n"
                "  Ranks share the parameters, so that all of them would see the update.\n"
                "  Call flush() on the TrainStep before you fork."
            )
        mine = [p for p in parameters if takes_over or self._rank_of[p] == self._store.host.index]
        claimed = self._store.claim([self._keys[p] for p in mine])
        chosen = {self._parameters[key] for key in claimed}
        try:
            try:
                self.hear()
                for parameter in chosen:
                    self._lend(parameter)
                yield chosen
            finally:
                self._take_back(chosen)
        except BaseException:
            self._store.give_back(claimed)
            raise
        self._updated |= chosen
        self._store.finish(claimed)

    def wait(self, parameters: Collection[torch.Tensor], go_on: GoOn, *, is_of_before: bool) -> None:
        """Waits until all ranks have updated their parts of some parameters; these are as if they were updated here.

        Args:
            parameters: Those that are updated.
            go_on: Called now and then; raises an error to give the wait up.
            is_of_before: The update is one of the step before, so that ranks may still go back to its end.

        Raises:
            OtherFailedError: If the update of another rank failed.
            RanksError: If another rank can't go on.
        """

        def is_over() -> bool:
            left = self._store.left([self._keys[p] for p in parameters])
            failed = [key for key, has_failed in left.items() if has_failed]
            if failed and is_of_before:
                raise OtherFailedError(
                    f"another rank of this host has failed to update `{failed[0]}`.\n"
                    "  Ranks share the parameters, and each updates a part of them.\n"
                    "  The other rank says why."
                )
            return not left

        wait_until(is_over, go_on, self._look, POLL_S)
        self.hear()
        for parameter in parameters:
            if parameter not in self._updated:
                self._updated.add(parameter)
                self._note_update(parameter)

    def _note_update(self, parameter: torch.Tensor) -> None:
        for twin in (self._store.twins[name] for name in self._names(parameter)):
            if twin.is_written:
                twin.drop()  # all ranks wrote the same before the update
        if not parameter.is_inference():
            increment_version(parameter)
        self._masters.wrote(parameter)

    def _names(self, parameter: torch.Tensor) -> list[Name]:
        key = self._keys[parameter]
        held = [
            Name(kind, key, name)
            for kind, optimizer in self._kinds.items()
            for name in optimizer.state.get(parameter, {})
        ]
        return [name for name in (Name(STATE, key), *held) if name in self._store.twins]

    # -- memory --------------------------------------------------------------------------------------------

    def hear(self) -> None:
        """Gives this rank's optimizers the moments that other ranks have made."""
        for kind, key, what in self._store.hear():
            if kind in self._kinds and key in self._parameters:
                state = self._kinds[kind].state[self._parameters[key]]
                state[what] = self._store.twins[Name(kind, key, what)].private

    def _lend(self, parameter: torch.Tensor) -> None:
        """Lets a parameter and its moments use the memory that all ranks see."""
        for name in self._names(parameter):
            self._store.twins[name].take_in()
        key = self._keys[parameter]
        for kind, optimizer in self._kinds.items():
            state = optimizer.state.get(parameter, {})
            for what, value in state.items():
                twin = self._store.twins.get(Name(kind, key, what))
                if twin is not None and isinstance(value, torch.Tensor) and twin.holds(value):
                    state[what] = twin.shared
        if (twin := self._store.twins.get(Name(STATE, key))) is not None:  # else it has no elements
            self._masters.move(parameter, twin.shared)

    def _take_back(self, parameters: Iterable[torch.Tensor]) -> None:
        """The reverse. New moments, and those that the update has put in place of others, go where all see them."""
        for parameter in parameters:
            if (twin := self._store.twins.get(Name(STATE, self._keys[parameter]))) is not None:
                self._masters.move(parameter, twin.private)
        for kind, optimizer in self._kinds.items():
            share_moments(self._store, kind, optimizer, {self._keys[p]: p for p in parameters})


def share_moments(store: SharedStore, kind: str, optimizer: Optimizer, parameters: Mapping[str, torch.Tensor]) -> None:
    """Moves an optimizer's moments of some parameters to memory that all ranks see, where they aren't there yet.

    Args:
        store: Has that memory.
        kind: Of the names of the moments.
        optimizer: The optimizer.
        parameters: By key.

    Raises:
        OptimizerError: If one of them can't be shared.
    """
    new: dict[Name, torch.Tensor] = {}
    for key, parameter in parameters.items():
        state = optimizer.state.get(parameter, {})
        for what, value in state.items():
            name = Name(kind, key, what)
            check_moment(optimizer, name, value)
            twin = store.twins.get(name)
            if twin is not None and twin.holds(value):
                continue
            if twin is None or not twin.fits(value):
                new[name] = value
            elif value.data_ptr() != twin.shared.data_ptr():
                twin.shared.copy_(value)
    if new:
        store.place(new)
    states = {key: optimizer.state.get(parameter, {}) for key, parameter in parameters.items()}
    names = [Name(kind, key, what) for key, state in states.items() for what in state]
    for name in names:
        if name in store.twins:
            states[name.key][name.what] = store.twins[name].private
    if new:
        new.clear()
        return_free_memory()  # between new moments that stay others are gone


def check_moment(optimizer: Optimizer, name: Name, value: object) -> None:
    """Refuses a part of an optimizer's state that can't be shared.

    Raises:
        OptimizerError: Naming it.
    """
    if unshareable_value(name.what, value):
        raise OptimizerError(
            f"the state `{name.what}` of `{name.key}` in {type(optimizer).__name__} is no plain tensor on the host.\n"
            "  Ranks of one host share the optimizer's state, and each updates a part of the parameters.\n"
            "  Leave such state out, or train in one process."
        )


Result = TypeVar("Result")

_EDGE = 4


def corner(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the first few elements along each dimension; of a tensor on meta zeros on the host."""
    if tensor.is_meta:
        return torch.zeros([min(size, _EDGE) for size in tensor.shape], dtype=tensor.dtype)
    return tensor.detach()[tuple(slice(0, _EDGE) for _ in tensor.shape)].clone()


def random_gradient(parameter: torch.Tensor, generator: torch.Generator, *, sparse: bool) -> torch.Tensor:
    """Returns a gradient for a stand-in, of its shape and dtype."""
    gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return gradient.to_sparse(1) if sparse and gradient.dim() else gradient


def with_gradients_it_takes(optimizer: Optimizer, attempt: Callable[[bool], Result]) -> Result:
    """Tries something with gradients such as the parameters have now, and then with the other kind.

    Some optimizers take sparse gradients only.

    Args:
        optimizer: The user's.
        attempt: Is told whether gradients are sparse.

    Raises:
        OptimizerError: If an attempt does.
        Exception: The error of the first attempt, if both fail: any error of the optimizer's code on its stand-ins.
    """
    is_sparse = any(p.grad is not None and p.grad.is_sparse for g in optimizer.param_groups for p in g["params"])
    causes: list[Exception] = []
    for sparse in (is_sparse, not is_sparse):
        try:
            return attempt(sparse)
        except OptimizerError:
            raise
        except Exception as error:  # an optimizer that takes only one kind may raise anything at the other
            causes.append(error)
    raise causes[0]
