"""What namespaces and containers hold at one time: tells what has changed in them, and puts it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatrain.tracer.equal import is_equal
from megatrain.tracer.python.contents import (
    BUFFERS,
    VALUES,
    held_in,
    holders_in,
    identity_of,
    is_unchangeable,
    put_into,
)
from megatrain.tracer.python.named import Named
from megatrain.tracer.python.outer import Outer, is_ours


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
        return identity_of(self.holder), self.label

    @property
    def is_plain(self) -> bool:
        """Tells whether a plain value was replaced by another: a number, a text, a flag, the numbers of an array."""
        values = (self.before, self.now)
        is_plain = isinstance(self.holder, BUFFERS) or all(isinstance(x, VALUES) for x in values)
        return is_plain and not is_equal(*values)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """The way to a namespace or container: what holds what by which label, from something that stays.

    Args:
        root: The attributes of a module or of a hook's object, or a variable.
        labels: From there on, each with which of the holders in what is found there.
    """

    root: Any
    labels: tuple[tuple[Any, int], ...] = ()

    def inner(self, item: Any, label: Any) -> Iterator[tuple[Any, Place]]:
        """Yields the holders in what is found under a label, and their places."""
        for which, holder in enumerate(holders_in(item)):
            yield holder, Place(self.root, (*self.labels, (label, which)))

    def find(self) -> Any:
        """Returns what is there now: the user may have put another list there."""
        holder = self.root
        for label, which in self.labels:
            holder = holders_in(held_in(holder)[label])[which]
        return holder


class Attributes:
    """What attributes of modules hold, and what containers and objects in them hold, at one time.

    Args:
        module: The outermost module.
        outer: What the modules' code reaches besides.
    """

    def __init__(self, module: nn.Module, outer: Outer | None = None) -> None:
        self._saved: dict[Any, tuple[str, Any, dict[Any, Any], Place]] = {}
        for prefix, child in module.named_modules():
            self._walk(prefix, child.__dict__, _is_any)
        for path, holder in outer.objects if outer else ():
            if identity_of(holder) not in self._saved:
                self._save(path, holder, Place(holder))
        for variable in outer.variables if outer else ():
            self._walk(variable.path.rpartition(".")[0], variable, is_ours)

    def _walk(self, name: str, root: Any, follows: Callable[[Any], bool]) -> None:
        stack: list[tuple[str, Any, Place]] = [(name, root, Place(root))]
        met = set[Any]()
        while stack:
            name, holder, place = stack.pop()
            identity = identity_of(holder)
            if identity in self._saved or identity in met:
                continue
            met.add(identity)
            for label, item in self._save(name, holder, place).items():
                if label is not ... and follows(item):
                    stack += [(_joined(name, label), *inner) for inner in place.inner(item, label)]

    def _save(self, name: str, holder: Any, place: Place) -> dict[Any, Any]:
        content = held_in(holder)
        is_in_namespace = isinstance(holder, Named) and id(holder.holder) in self._saved
        if not is_in_namespace and not is_unchangeable(holder):
            self._saved[identity_of(holder)] = (name, holder, content, place)
        return content

    @property
    def holders(self) -> frozenset[Any]:
        """Identities of the namespaces, containers and variables."""
        return frozenset(self._saved)

    def restore(self) -> None:
        """Puts everything back in place."""
        for _, holder, content, _ in self._saved.values():
            now = held_in(holder)
            if not _is_same(holder, content, now):
                put_into(holder, content, [label for label in now if label not in content])

    def changes(self) -> list[Change]:
        """Lists what is held differently now."""
        found: list[Change] = []
        for name, holder, before, place in self._saved.values():
            now = held_in(holder)
            if _is_same(holder, before, now):
                continue
            for label in dict.fromkeys([*before, *now]):
                if before.get(label) is not now.get(label):
                    values = before.get(label), now.get(label)
                    found.append(Change(_joined(name, label), holder, label, *values, place))
        return found


def _joined(name: str, label: Any) -> str:
    if label is ...:
        return name
    return f"{name}.{label}" if name else str(label)


def _is_any(_: Any) -> bool:
    return True


def _is_same(holder: Any, left: dict[Any, Any], right: dict[Any, Any]) -> bool:
    if isinstance(holder, BUFFERS):
        return is_equal(left[...], right[...])
    return left.keys() == right.keys() and all(left[k] is right[k] for k in left)
