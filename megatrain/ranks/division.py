"""Parts: the state that ranks share, what of it each has written between steps, and what each updates in a step.

Before the first step each rank has the model in memory of its own. Once ranks have found the same values, the first
one copies them to memory that all share, and the others let go of theirs. From then on the
user's code of each rank still writes on its own (`Twin`). What it wrote between two steps is found here, must be the
same on all ranks, and is then given to all by the first one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.autograd.graph import increment_version

from megatrain.base.host_limits import return_free_memory
from megatrain.errors import ExecuteError
from megatrain.files import Source
from megatrain.optim.proxy import Optimizer
from megatrain.ranks.facts import Trained, digest_text
from megatrain.ranks.landings import Landings
from megatrain.ranks.processes import Ranks
from megatrain.ranks.shared_store import GRADIENT, LOW, STATE, Name, Twin
from megatrain.runtime.stores.residency import StorePlace

Changed = Mapping[str, str]
"""What isn't shared yet, or was written by this rank's user: a text of its value, by its name."""


class Parts:
    """What ranks share, and the part of the updates that this rank makes.

    Each parameter has one rank that updates it. A rank that completes due updates on its own, because the user's code
    looks at them, also makes those of others: the rank that first claims a parameter updates it, and all others wait.

    While a parameter is updated, it and its moments use the memory that all ranks see; at all other times the memory
    where this rank's user writes on its own.

    Args:
        ranks: All of them.
        compiled: The model.
        optimizers: In the order of their steps.
    """

    def __init__(self, ranks: Ranks, compiled: Trained, optimizers: Sequence[Optimizer]):
        self._ranks, self._store = ranks, ranks.store
        self._compiled, self._masters = compiled, compiled.masters
        self._kinds = {self._store.kind_of(optimizer): optimizer for optimizer in optimizers}
        self._parameters: dict[str, torch.Tensor] = {}
        self._keys: dict[torch.Tensor, str] = {}
        self._new: dict[Name, torch.Tensor] = {}
        self._written: list[Name] = []
        self._gone: list[Name] = []
        self._updated: set[torch.Tensor] = set()
        self._process = os.getpid()
        self._using = 0

    # -- before a step -------------------------------------------------------------------------------------

    def changed(self) -> Changed:
        """Finds what this rank has to share.

        Raises:
            OptimizerError: If an optimizer has state that can't be shared.
        """
        engine, twins = self._compiled.engine, self._store.twins
        engine.refresh()
        assert engine.store is not None
        if not all(key in engine.store.residencies for key in engine.tensors):
            engine.adopt_state()
        self._parameters = {key: t for key, t in engine.tensors.items() if isinstance(t, torch.nn.Parameter)}
        self._keys = {parameter: key for key, parameter in self._parameters.items()}
        now = {Name(STATE, key): residency.view for key, residency in engine.store.residencies.items()}
        for optimizer in self._kinds.values():
            now |= self._store.moments(optimizer, self._parameters)
        now = {name: tensor for name, tensor in now.items() if tensor.numel()}
        self._new = {name: tensor for name, tensor in now.items() if not self._store.holds(name, tensor)}
        self._written = [name for name in now if name not in self._new and twins[name].has_changed]
        self._gone = [n for n, twin in twins.items() if n.kind in self._kinds and n not in now and twin.private.numel()]
        for name in self._written:
            if name.kind == STATE:
                # Now, so that no rank does that once others go on to updates.
                self._masters.settle(engine.tensors[name.key])
        found = {self._text(name): digest_text(Source.of(now[name].detach())) for name in (*self._new, *self._written)}
        return {**found, **{self._text(name): "gone" for name in self._gone}}

    def _text(self, name: Name) -> str:
        of = "" if name.kind == STATE else f" of `{name.key}` in optimizer {[*self._kinds].index(name.kind)}"
        return f"the value of `{name.what or name.key}`{of}"

    def share(self, meet: Callable[[], object]) -> None:
        """Shares it; all ranks call this at the same time.

        Args:
            meet: Waits until all ranks have called it.
        """
        store, masters = self._store, self._masters
        fresh = {name.key for name in self._new if name.kind == STATE}
        if fresh:
            masters.find()
        if store.rank == 0:  # it writes for all of them
            for name in self._written:
                store.twins[name].take_in()
            lows = masters.lows() if fresh else {}
            store.place({**self._new, **{Name(LOW, key): lows[key] for key in lows.keys() & fresh}})
        meet()
        store.hear(self._parameters)
        for name in (*self._new, *self._written):
            store.twins[name].drop()
            if name.kind != STATE:
                self._kinds[name.kind].state[self._parameters[name.key]][name.what] = store.twins[name].private
        for name in self._gone:
            del store.twins[name]
        if fresh:
            self._move({key: store.twins[Name(STATE, key)] for key in fresh})

    def _move(self, moved: Mapping[str, Twin]) -> None:
        """Has the model where ranks share it."""
        engine, masters, twins = self._compiled.engine, self._masters, self._store.twins
        assert engine.store is not None
        sent = {} if engine.device.can_bind else self._store.sent(moved)
        engine.bus.lock(list({id(each.arena): each.arena for each in sent.values()}.values()))
        with masters.moving():
            engine.store.move({k: StorePlace(t.region.arena, t.start, t.private) for k, t in moved.items()}, sent)
            masters.take_lows({k: twins[Name(LOW, k)].shared for k in moved if Name(LOW, k) in twins})

    def know(self, blocks: Iterable[Iterable[str]]) -> None:
        """Gives the parameters whose gradients are whole with each block to ranks, unless they have one."""
        self._store.deal({key: self._parameters[key].nbytes for key in block} for block in blocks)

    # -- updates -------------------------------------------------------------------------------------------

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
            self._store.end(claimed, has_failed=True)
            raise
        self._updated |= chosen.keys()
        self._store.end(claimed, has_failed=False)

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
