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
from megatrain.ranks.facts import Trained, digest_text
from megatrain.ranks.processes import refuse_difference
from megatrain.ranks.shared_store import LOW, STATE, Name, SharedStore, Twin
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
        self._compiled, self._store = compiled, store
        self._kinds = {store.kind_of(optimizer): optimizer for optimizer in optimizers}
        self._new: dict[Name, torch.Tensor] = {}
        self._written: list[Name] = []
        self._gone: list[Name] = []

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
        now = {Name(STATE, key): residency.view for key, residency in engine.store.residencies.items()}
        for optimizer in self._kinds.values():
            now |= self._store.moments(optimizer, self._trained())
        now = {name: tensor for name, tensor in now.items() if tensor.numel()}
        self._new = {name: tensor for name, tensor in now.items() if not self._store.holds(name, tensor)}
        self._written = [name for name in now if name not in self._new and twins[name].has_changed]
        self._gone = [n for n, twin in twins.items() if n.kind in self._kinds and n not in now and twin.private.numel()]
        for name in self._written:
            if name.kind == STATE:
                # Now, so that no rank does that once others go on to updates.
                self._compiled.masters.settle(engine.tensors[name.key])
        found = {self._text(name): digest_text(now[name]) for name in (*self._new, *self._written)}
        return {**found, **{self._text(name): "gone" for name in self._gone}}

    def _text(self, name: Name) -> str:
        of = "" if name.kind == STATE else f" of `{name.key}` in optimizer {[*self._kinds].index(name.kind)}"
        return f"the value of `{name.what or name.key}`{of}"

    def _trained(self) -> dict[str, nn.Parameter]:
        tensors = self._compiled.engine.tensors
        return {key: tensor for key, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}

    def share(self, meet: Callable[[], object]) -> None:
        """Shares it; all ranks call this at the same time.

        Args:
            meet: Waits until all ranks have called it.
        """
        store, masters, trained = self._store, self._compiled.masters, self._trained()
        fresh = {name.key for name in self._new if name.kind == STATE}
        if fresh:
            masters.find()
        if store.rank == 0:  # it writes for all of them
            for name in self._written:
                store.twins[name].take_in()
            lows = masters.lows() if fresh else {}
            store.place({**self._new, **{Name(LOW, key): lows[key] for key in lows.keys() & fresh}})
        meet()
        store.hear(trained)
        for name in (*self._new, *self._written):
            store.twins[name].drop()
            if name.kind != STATE:
                self._kinds[name.kind].state[trained[name.key]][name.what] = store.twins[name].private
        for name in self._gone:
            del store.twins[name]
        if fresh:
            self._move({key: store.twins[Name(STATE, key)] for key in fresh})

    def _move(self, moved: Mapping[str, Twin]) -> None:
        """Has the model where ranks share it."""
        engine, masters, twins = self._compiled.engine, self._compiled.masters, self._store.twins
        assert engine.store is not None
        sent = {} if engine.device.can_bind else self._store.sent(moved)
        engine.bus.lock(list({id(each.arena): each.arena for each in sent.values()}.values()))
        with masters.moving():
            engine.store.move({k: StorePlace(t.region.arena, t.start, t.private) for k, t in moved.items()}, sent)
            masters.take_lows({k: twins[Name(LOW, k)].shared for k in moved if Name(LOW, k) in twins})


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
