"""What a forward leaves in attributes besides what it returns: tensors it computed, lengths, flags, hooks."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from megatrain.errors import TraceError
from megatrain.tracer.arguments import Structure
from megatrain.tracer.python.python_values import BUFFERS, CONTAINERS, HOLDERS, held_in, items_of, leaves_of, put_into
from megatrain.tracer.python.snapshot import Change, HolderPlace
from megatrain.tracer.python.watch import HOOKS


@dataclass(frozen=True, slots=True, eq=False)
class OutputPlace:
    """Where a value that a holder has after the call comes from.

    Args:
        kind: `"old"`: the holder has it already, under `key`; `"new"`: made for each call, number `key`;
            `"fixed"`: the object `key` itself, at every call.
    """

    kind: str
    key: Any


@dataclass(frozen=True, slots=True, eq=False)
class HeldObject:
    """What a call leaves in one namespace, dictionary, list or set.

    Args:
        content: All that a list or set holds afterwards, what has changed in whatever has names or was appended to.
        is_appended: It is a list whose items stay: an earlier micro-batch of the same step may have left more.
    """

    place: HolderPlace
    content: tuple[tuple[Any, OutputPlace], ...]
    removed: tuple[Any, ...]
    is_appended: bool = False

    def put(self, new: Sequence[Any]) -> None:
        """Puts it in place; `new` are the values made for this call."""
        holder = self.place.find()
        old = held_in(holder)
        left = {
            label: old.get(s.key) if s.kind == "old" else new[s.key] if s.kind == "new" else s.key
            for label, s in self.content
        }
        if self.is_appended:
            holder.extend(left.values())
        else:
            put_into(holder, left, self.removed)


@dataclass(frozen=True, slots=True, eq=False)
class SideOutputs:
    """All that a call leaves in attributes."""

    names: tuple[str, ...]
    held: tuple[HeldObject, ...]
    structure: Structure

    @staticmethod
    def of(changes: Sequence[Change], state: dict[int, torch.Tensor]) -> SideOutputs:
        """Reads what a forward has left; `state` has the parameter or buffer behind each fake one, by its identity.

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
        """Tells whether a change is one that a later call makes too, rather than a trace of the capture itself."""
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

    def held(self, changes: Sequence[Change]) -> HeldObject:
        """Says how to leave what `changes`, all of one holder, have left."""
        holder, place = changes[0].holder, changes[0].place
        if isinstance(holder, (dict, *HOLDERS, *BUFFERS)):
            there = held_in(holder)
            removed = tuple(c.label for c in changes if c.label not in there)
            content = [(c.label, self._slot(c.now)) for c in changes if c.label in there]
            return HeldObject(place, tuple(content), removed)
        if isinstance(holder, list | deque) and all(change.is_added for change in changes):
            return HeldObject(place, tuple((c.label, self._slot(c.now)) for c in changes), (), is_appended=True)
        before = {id(c.before): c.label for c in changes}
        changed = {c.label for c in changes}
        content = [
            (label, OutputPlace("old", before.get(id(item), label) if label in changed else label))
            if id(item) in before or label not in changed
            else (label, self._slot(item))
            for label, item in items_of(holder).items()
        ]
        return HeldObject(place, tuple(content), ())

    def _slot(self, value: Any) -> OutputPlace:
        if id(value) in self._state:
            return OutputPlace("fixed", self._state[id(value)])
        leaves = list(leaves_of(value))
        is_copied = any(isinstance(x, torch.Tensor) for x in leaves) or isinstance(value, CONTAINERS)
        if not is_copied or any(isinstance(x, nn.Module | MethodType) for x in leaves):
            return OutputPlace("fixed", value)
        self.new.append(value)
        return OutputPlace("new", len(self.new) - 1)
