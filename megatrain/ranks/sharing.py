"""Sharing: what ranks do before each step so that they share one store.

Before the first step each rank has the model in memory of its own. Once ranks have found the same values, the first
one copies them to memory that all share, and the others let go of theirs. From then on the
user's code of each rank still writes on its own (`Twin`). What it wrote between two steps is found here, must be the
same on all ranks, and is then given to all by the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from megatrain.optim.proxy import Optimizer
from megatrain.ranks.division import check_moment, share_moments
from megatrain.ranks.facts import Trained, digest_text
from megatrain.ranks.processes import refuse_difference
from megatrain.ranks.shared_store import LOW, STATE, Name, SharedStore
from megatrain.runtime.stores.residency import StorePlace

Changed = Mapping[str, str]
"""What isn't shared yet, or was written by this rank's user: a text of its value, by its name."""


class Sharing:
    """Shares what isn't shared yet, and what users have written.

    Args:
        compiled: The model.
        optimizers: In the order of their steps.
        store: What ranks share.
    """

    def __init__(self, compiled: Trained, optimizers: Sequence[Optimizer], store: SharedStore):
        self._compiled, self._optimizers, self._store = compiled, optimizers, store
        self._places: dict[str, torch.Tensor] = {}
        self._moments: set[Name] = set()
        self._written: set[Name] = set()

    def changed(self) -> Changed:
        """Finds what this rank has to share."""
        engine = self._compiled.engine
        engine.refresh()
        assert engine.store is not None
        if not all(key in engine.store.residencies for key in engine.tensors):
            engine.adopt_state()
        found: dict[str, str] = {}
        self._places, self._moments, self._written = {}, set(), set()
        for key, home in engine.store.residencies.items():
            twin = self._store.twins.get(Name(STATE, key))
            if home.spec.nbytes == 0:
                continue
            if twin is None or twin.arena is not home.arena:
                self._places[key] = home.view
            elif twin.has_changed:
                self._written.add(Name(STATE, key))
            else:
                continue
            found[f"the value of `{key}`"] = digest_text(home.view)
        for name in self._written:
            # Now, so that no rank does that once others go on to updates.
            self._compiled.masters.settle(engine.tensors[name.key])
        return {**found, **self._changed_moments()}

    def _changed_moments(self) -> Changed:
        found: dict[str, str] = {}
        for number, optimizer in enumerate(self._optimizers):
            kind = self._store.kind_of(optimizer)
            for key, parameter in self._trained().items():
                state = optimizer.state.get(parameter, {})
                for what, value in state.items():
                    name = Name(kind, key, what)
                    check_moment(optimizer, name, value)
                    twin = self._store.twins.get(name)
                    if twin is not None and twin.holds(value) and not twin.has_changed:
                        continue
                    if value.numel():
                        self._moments.add(name)
                        found[f"the value of `{what}` of `{key}` in optimizer {number}"] = digest_text(value)
                gone = [n for n in self._store.twins if n.kind == kind and n.key == key and n.what not in state]
                for name in gone:
                    found[f"the value of `{name.what}` of `{key}` in optimizer {number}"] = "gone"
                    self._moments.add(name)
        return found

    def _trained(self) -> dict[str, nn.Parameter]:
        tensors = self._compiled.engine.tensors
        return {key: tensor for key, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}

    def share(self, meet: Callable[[], object]) -> None:
        """Shares it; all ranks call this at the same time.

        Args:
            meet: Waits until all ranks have called it.
        """
        if self._store.rank == 0:
            self._give()
        meet()
        self._take()

    def _give(self) -> None:
        """The first rank writes for all of them."""
        parameters = self._trained()
        masters = self._compiled.masters
        masters.find()
        lows = {Name(LOW, key): low for key, low in masters.lows().items() if key in self._places}
        places = {Name(STATE, key): view for key, view in self._places.items()}
        # Parameters without elements have no memory, but one rank updates their moments (the number of steps).
        empty = [key for key, p in parameters.items() if p.numel() == 0 and not self._store.counts_updates(key)]
        if places:
            self._store.place({**places, **lows}, [*(key for key in self._places if key in parameters), *empty])
        for name in self._written:
            self._store.twins[name].take_in()
        for optimizer in self._optimizers:
            kind = self._store.kind_of(optimizer)
            mine = [name for name in self._moments if name.kind == kind]
            for name in mine:
                if (twin := self._store.twins.get(name)) is not None:
                    twin.take_in()
            share_moments(self._store, kind, optimizer, {n.key: parameters[n.key] for n in mine})

    def _take(self) -> None:
        """Each rank goes on with what the first one wrote."""
        self._store.hear()
        engine, twins = self._compiled.engine, self._store.twins
        assert engine.store is not None
        moved = {key: twins[Name(STATE, key)] for key in self._places}
        if moved:
            self._compiled.masters.find()
            sent = {} if engine.device.can_bind else self._store.sent(moved)
            engine.bus.lock(list({id(each.arena): each.arena for each in sent.values()}.values()))
            with self._compiled.masters.moving():
                engine.store.move({k: StorePlace(t.arena, t.start, t.private) for k, t in moved.items()}, sent)
                self._compiled.masters.take_lows(
                    {key: twins[Name(LOW, key)].shared for key in moved if Name(LOW, key) in twins}
                )
        for name in self._written:
            twins[name].drop()
        parameters = self._trained()
        for optimizer in self._optimizers:
            kind = self._store.kind_of(optimizer)
            for name in (name for name in self._moments if name.kind == kind):
                state = optimizer.state.get(parameters[name.key], {})
                if name.what not in state:
                    twins.pop(name, None)
                    continue
                twins[name].drop()
                state[name.what] = twins[name].private


def check_changed(words: Sequence[Changed]) -> bool:
    """Tells whether there is something to share, once it is the same on all ranks.

    Raises:
        RanksError: Naming what isn't.
    """
    refuse_difference(
        words,
        "Code that writes parameters, buffers or an optimizer's state between two steps must do the same on\n"
        "  each rank, although ranks of one host share the memory.\n"
        "  Write on all ranks, then take the step.",
        nothing="as it was",
    )
    return any(words)
