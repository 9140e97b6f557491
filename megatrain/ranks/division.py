"""Parts: which of several ranks updates which parameters, in memory that all of them share."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.autograd.graph import increment_version

from megatrain.base.host_limits import return_free_memory
from megatrain.errors import ExecuteError
from megatrain.optim.masters.registry import Masters
from megatrain.optim.proxy import Optimizer
from megatrain.ranks.landings import Landings
from megatrain.ranks.processes import Ranks
from megatrain.ranks.shared_store import GRADIENT, STATE, Name, SharedStore, Twin


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
        """Has a whole gradient of this rank's part where all ranks find it; returns it there."""
        name, offset = Name(GRADIENT, self._keys[parameter]), landings.offset_of(gradient)
        if offset < 0:  # a sum over parts of a parameter, or what a hook has made
            self._store.place({name: gradient})
            gradient = self._store.twins[name].shared
        self._store.show(name.key, self._ranks.count, offset)
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
        shown = {key: None if others is None else self._store.shown(key, self._using) for key in keys}
        found = {p: gradients[p] for p in held if p in gradients}
        claimed = self._store.claim([*own, *(key for key, at in shown.items() if at is not None and key not in own)])
        chosen = {self._parameters[key]: shown[key] for key in claimed}
        try:
            try:
                self._store.hear(self._parameters)
                for parameter, offset in chosen.items():
                    self._lend(parameter)
                    if parameter not in found and offset is not None and others is not None:
                        found[parameter] = self._gradient(parameter, offset, others)
                yield {p: found[p] for p in chosen if p in found}
            finally:
                self._take_back(chosen)
        except BaseException:
            self._store.give_back(claimed)
            raise
        self._updated |= chosen.keys()
        self._store.finish(claimed)

    def _gradient(self, parameter: torch.Tensor, offset: int, landings: Landings) -> torch.Tensor:
        """The whole gradient of another rank's parameter, where that rank has it."""
        key = self._keys[parameter]
        if offset < 0:
            return self._store.twins[Name(GRADIENT, key)].shared
        return landings.gradient_at(self._store.owners[key], offset, parameter)

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
