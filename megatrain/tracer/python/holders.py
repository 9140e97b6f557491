"""What namespaces and containers hold at one time: tells what has changed in them, and puts it back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from megatrain.tracer.equal import is_equal
from megatrain.tracer.python.globals import Named
from megatrain.tracer.python.outer import Outer, is_ours
from megatrain.tracer.python.snapshot import MISSING

_CONTAINERS = (dict, list, set, deque)
_SCALARS = (bool, int, float, str, type(None))
# What is longer is data that a module refers to, a vocabulary or a data set, and not its state.
_LARGEST = 4096


@dataclass(frozen=True, slots=True)
class Change:
    """An attribute, or an item of a container in one, that holds another object; None for nothing."""

    name: str
    holder: Any
    label: Any
    before: Any
    now: Any
    place: Place

    @property
    def where(self) -> tuple[Any, Any]:
        """Tells places apart, whoever looked."""
        return _identity(self.holder), self.label

    @property
    def is_plain(self) -> bool:
        """Tells whether a plain value was replaced by another: a number, a text, a flag."""
        values = (self.before, self.now)
        return all(isinstance(x, _SCALARS) for x in values) and not is_equal(*values)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """The way to a namespace or container: what holds what by which label, from something that stays.

    Args:
        root: The attributes of a module or of a hook's object, or a variable.
        labels: From there on.
    """

    root: Any
    labels: tuple[Any, ...] = ()

    def inner(self, label: Any) -> Place:
        """The place inside."""
        return Place(self.root, (*self.labels, label))

    def find(self) -> Any:
        """Returns what is there now: the user may have put another list there."""
        holder = self.root
        for label in self.labels:
            holder = _inner(_items(holder)[label])
        return holder


class Attributes:
    """What attributes of modules hold, and what plain containers and objects in them hold, at one time.

    Args:
        module: The outermost module.
        outer: What the modules' code reaches besides.
    """

    def __init__(self, module: nn.Module, outer: Outer | None = None) -> None:
        self._saved: dict[Any, tuple[str, Any, dict[Any, Any], Place]] = {}
        for prefix, child in module.named_modules():
            self._walk(prefix, child.__dict__, _is_any)
        for path, holder in outer.objects if outer else ():
            if _identity(holder) not in self._saved:
                self._save(path, holder, Place(holder))
        for variable in outer.variables if outer else ():
            self._walk(variable.path.rpartition(".")[0], variable, is_ours)

    def _walk(self, name: str, root: Any, follows: Callable[[Any], bool]) -> None:
        stack: list[tuple[str, Any, Place]] = [(name, root, Place(root))]
        while stack:
            name, holder, place = stack.pop()
            if _identity(holder) in self._saved or (not isinstance(holder, Named) and len(holder) > _LARGEST):
                continue
            for label, item in self._save(name, holder, place).items():
                inner = _inner(item) if follows(item) else None
                if inner is not None:
                    stack.append((_joined(name, label), inner, place.inner(label)))

    def _save(self, name: str, holder: Any, place: Place) -> dict[Any, Any]:
        content = _items(holder)
        if not (isinstance(holder, Named) and id(holder.holder) in self._saved):
            self._saved[_identity(holder)] = (name, holder, content, place)
        return content

    @property
    def holders(self) -> frozenset[Any]:
        """Identities of the namespaces, containers and variables."""
        return frozenset(self._saved)

    def restore(self) -> None:
        """Puts everything back in place."""
        for _, holder, content, _ in self._saved.values():
            if not _is_same(content, _items(holder)):
                _put_back(holder, content)

    def changes(self) -> list[Change]:
        """Lists what is held differently now."""
        found: list[Change] = []
        for name, holder, before, place in self._saved.values():
            now = _items(holder)
            for label in dict.fromkeys([*before, *now]):
                if before.get(label) is not now.get(label):
                    values = before.get(label), now.get(label)
                    found.append(Change(_joined(name, label), holder, label, *values, place))
        return found


def _put_back(holder: Any, content: dict[Any, Any]) -> None:
    if isinstance(holder, Named):
        holder.put(content.get(holder.name, MISSING))
    elif isinstance(holder, dict):
        # One by one: another thread may be reading what hasn't changed.
        for label in [label for label in holder if label not in content]:
            del holder[label]
        holder.update(content)
    else:
        holder.clear()
        if isinstance(holder, list | deque):
            holder.extend(content.values())
        else:
            holder.update(content)


def _joined(name: str, label: Any) -> str:
    return f"{name}.{label}" if name else str(label)


def _identity(holder: Any) -> Any:
    return holder.key if isinstance(holder, Named) else id(holder)


def _is_any(_: Any) -> bool:
    return True


def _inner(item: Any) -> Any:
    """Returns the container that an item is, or the attributes that it has; None where it holds nothing."""
    return item if isinstance(item, _CONTAINERS) else _attributes_of(item)


def _items(holder: Any) -> dict[Any, Any]:
    if isinstance(holder, Named):
        value = holder.now()
        return {} if value is MISSING else {holder.name: value}
    if isinstance(holder, dict):
        return dict(holder)
    return dict(enumerate(holder)) if isinstance(holder, list | deque) else {x: x for x in holder}


def _is_same(left: dict[Any, Any], right: dict[Any, Any]) -> bool:
    return left.keys() == right.keys() and all(left[k] is right[k] for k in left)


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """Returns the attributes of a plain Python object; modules are visited on their own."""
    if isinstance(value, nn.Module | torch.Tensor | type | ModuleType | FunctionType | Enum):
        return None
    return getattr(value, "__dict__", None) if type(getattr(value, "__dict__", None)) is dict else None
