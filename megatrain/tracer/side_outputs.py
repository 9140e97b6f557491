"""What a forward leaves in attributes besides what it returns: tensors it computed, lengths, flags, hooks."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from megatrain.errors import TraceError
from megatrain.tracer.kept import MISSING, items_of, vars_of
from megatrain.tracer.named import Named
from megatrain.tracer.sandbox import Change, Place
from megatrain.tracer.structure import Structure
from megatrain.tracer.tree import HOOKS

_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Where a value that a holder has after the call comes from.

    Args:
        kind: `"old"`: the holder has it already, under `key`; `"new"`: made for each call, number `key`;
            `"fixed"`: the object `key` itself, at every call.
        key: See `kind`.
    """

    kind: str
    key: Any


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What a call leaves in one namespace, dictionary, list or set.

    Args:
        place: Where the namespace or container is found.
        content: All that a list or set holds afterwards, what has changed in a namespace or dictionary.
        removed: Keys that are gone from it.
    """

    place: Place
    content: tuple[tuple[Any, Slot], ...]
    removed: tuple[Any, ...]

    def put(self, new: Sequence[Any]) -> None:
        """Puts it in place; `new` are the values made for this call."""
        holder = self.place.find()
        old = items_of(holder)
        found = [(label, old.get(s.key) if s.kind == "old" else new[s.key] if s.kind == "new" else s.key)
                 for label, s in self.content]  # fmt: skip
        if isinstance(holder, Named):
            holder.put(found[0][1] if found else MISSING)
            return
        if isinstance(holder, dict):
            for label in self.removed:
                holder.pop(label, None)
            holder.update(found)
            return
        holder.clear()
        add: Callable[[Any], Any] = holder.add if isinstance(holder, set) else holder.append
        for _, value in found:
            add(value)


@dataclass(frozen=True, slots=True, eq=False)
class SideOutputs:
    """All that a call leaves in attributes.

    Args:
        names: The attributes and items, for reading.
        held: What to put where.
        structure: The values made for each call, with their tensors numbered.
    """

    names: tuple[str, ...]
    held: tuple[Held, ...]
    structure: Structure

    @staticmethod
    def of(changes: Sequence[Change], state: dict[int, torch.Tensor]) -> SideOutputs:
        """Reads what a forward has left.

        Args:
            changes: What the modules and what they hold have now, other than before.
            state: The parameter or buffer behind each fake one, by identity of the fake one.

        Raises:
            TraceError: If tensors are held by an object that can't be made again for each call.
        """
        found = _Collected(state)
        by_holder: dict[int, list[Change]] = {}
        for change in changes:
            if id(change.before) not in state and found.is_repeatable(change):
                by_holder.setdefault(id(change.holder), []).append(change)
        held = tuple(found.held(group) for group in by_holder.values())
        names = dict.fromkeys(_name_of(change) for group in by_holder.values() for change in group)
        return SideOutputs(tuple(names), held, Structure.of(found.new))

    def put(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leaves what eager would, with this call's `tensors` in the order of the structure."""
        if self.held:
            new = self.structure.fill(tensors)
            for held in self.held:
                held.put(new)


def _name_of(change: Change) -> str:
    """Names an attribute or item; not hooks, whose numbers count all hooks of the process."""
    parent = change.name.rpartition(".")[0]
    return parent if parent.endswith(HOOKS) else change.name


class _Collected:
    """The values that a forward left, told by what it takes to leave them again."""

    def __init__(self, state: dict[int, torch.Tensor]) -> None:
        self.new: list[Any] = []
        self._state = state

    def is_repeatable(self, change: Change) -> bool:
        """Tells whether a change is one that a later call makes too, rather than a trace of the capture itself.

        Raises:
            TraceError: If it holds tensors and can't be repeated.
        """
        leaves = list(leaves_of(change.now))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        computed = [x for x in tensors if id(x) not in self._state]
        if tensors and not computed:
            return isinstance(change.now, torch.Tensor) and self._state[id(change.now)] is not change.before
        # Weak references are to the fake state, as are those of cuDNN's weights in an LSTM.
        if any(isinstance(x, weakref.ref) for x in leaves):
            return False
        if computed and any(isinstance(x, nn.Module | MethodType) for x in leaves):
            raise TraceError(
                f"the forward leaves tensors in `{change.name}`, a {type(change.now).__qualname__} that also holds "
                "modules.\n  Each call must leave new tensors, but objects that hold modules can't be copied for "
                "each call.\n"
                "  Keep the tensors in a separate attribute, list or dict."
            )
        return True

    def held(self, changes: Sequence[Change]) -> Held:
        """Says how to leave what `changes`, all of one holder, have left."""
        holder, place = changes[0].holder, changes[0].place
        if isinstance(holder, Named):
            now = holder.now()
            return Held(place, () if now is MISSING else ((holder.name, self._slot(now)),), ())
        if isinstance(holder, dict):
            removed = tuple(c.label for c in changes if c.label not in holder)
            content = [(c.label, self._slot(c.now)) for c in changes if c.label in holder]
            return Held(place, tuple(content), removed)
        before = {id(c.before): c.label for c in changes}
        changed = {c.label for c in changes}
        content = [
            (label, Slot("old", before.get(id(item), label) if label in changed else label))
            if id(item) in before or label not in changed
            else (label, self._slot(item))
            for label, item in items_of(holder).items()
        ]
        return Held(place, tuple(content), ())

    def _slot(self, value: Any) -> Slot:
        if id(value) in self._state:
            return Slot("fixed", self._state[id(value)])
        leaves = list(leaves_of(value))
        is_copied = any(isinstance(x, torch.Tensor) for x in leaves) or isinstance(value, _CONTAINERS)
        if not is_copied or any(isinstance(x, nn.Module | MethodType) for x in leaves):
            return Slot("fixed", value)
        self.new.append(value)
        return Slot("new", len(self.new) - 1)


def leaves_of(value: Any) -> Iterator[Any]:
    """Yields what containers and plain objects in `value` hold at last, not looking into modules."""
    stack, met = [value], set[int]()
    while stack:
        value = stack.pop()
        is_leaf = isinstance(value, torch.Tensor | nn.Module | MethodType | type | weakref.ref) or callable(value)
        inner = [] if is_leaf else [*items_of(value).values(), *vars_of(value).values()]
        if id(value) in met:
            continue
        met.add(id(value))
        if not inner and value is not MISSING:
            yield value
        stack += inner
