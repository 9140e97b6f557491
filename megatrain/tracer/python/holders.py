"""What namespaces and containers hold at one time: tells what has changed in them, and puts it back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from types import SimpleNamespace
from typing import Any

from torch import nn

from megatrain.tracer.python.contents import (
    BUFFERS,
    CONTAINERS,
    GENERATORS,
    VALUES,
    GeneratorState,
    Holder,
    Named,
    held_in,
    holders_in,
    identity_of,
    is_unchangeable,
    put_into,
)
from megatrain.tracer.python.globals import named_variables, owned
from megatrain.tracer.source_line import file_of, is_library
from megatrain.tracer.spec import is_equal


@dataclass(frozen=True, slots=True, eq=False)
class Outer:
    """Where such state lies.

    Args:
        variables: Globals, variables of closures, attributes of classes, arguments bound to hooks.
        objects: Names and attributes of objects whose methods are hooks, or that are hooks themselves.
    """

    variables: Sequence[Named] = ()
    objects: Sequence[tuple[str, dict[str, Any]]] = ()

    @staticmethod
    def of(model: nn.Module, without: Collection[int] = ()) -> Outer:
        """Finds it by looking at code; nothing is run.

        Args:
            model: The model.
            without: Identities of forward hooks to leave out.
        """
        objects: dict[int, tuple[str, dict[str, Any]]] = {}
        for module in model.modules():
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                for found in owned(hook) if id(hook) not in without else ():
                    if found.is_object:
                        objects[id(found.values)] = (found.path, found.values)
        return Outer(named_variables(model, without=without).found, list(objects.values()))

    @staticmethod
    def of_hook(hook: Any) -> Outer:
        """Finds what one hook reaches."""
        module = nn.Module()
        module._forward_hooks[0] = hook
        return Outer.of(module)


def is_ours(value: Any) -> bool:
    """Tells whether what an object holds may be the model's state, rather than a library's own affairs."""
    kind = type(value)
    if kind is SimpleNamespace or kind.__module__ == "builtins" or isinstance(value, CONTAINERS):
        return True
    return not is_library(file_of(kind))


# What changes as a whole, however little of it does.
_WHOLE = (*BUFFERS, GeneratorState)


@dataclass(frozen=True, slots=True)
class Change:
    """An attribute, or an item of a container in one, that holds another object; None for nothing.

    Attributes:
        is_added: Nothing was held there before, not even None.
    """

    name: str
    holder: Any
    label: Any
    before: Any
    now: Any
    place: HolderPlace
    is_added: bool

    @property
    def where(self) -> tuple[Any, Any]:
        """Tells places apart: equal for equal places, however they were found."""
        return identity_of(self.holder), self.label

    @property
    def is_plain(self) -> bool:
        """Tells whether a plain value was replaced by another: a number, a text, a flag, the numbers of an array."""
        values = (self.before, self.now)
        is_plain = isinstance(self.holder, BUFFERS) or all(isinstance(x, VALUES) for x in values)
        return is_plain and not is_equal(*values)


@dataclass(frozen=True, slots=True, eq=False)
class HolderPlace:
    """The way to a namespace or container: what holds what by which label, from something that stays.

    Args:
        root: The attributes of a module or of a hook's object, or a variable.
        labels: From there on, each with which of the holders in what is found there.
    """

    root: Any
    labels: tuple[tuple[Any, int], ...] = ()

    def find(self) -> Any:
        """Returns what is there now: the user may have put another list there."""
        holder = self.root
        for label, which in self.labels:
            holder = holders_in(held_in(holder)[label])[which]
        return holder


class ModuleClass(Holder):
    """The class of a module, which code may change: `torch.nn.utils.parametrize` does."""

    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def key(self) -> Any:
        """See `Holder.key`."""
        return id(self.module), ModuleClass

    def held(self) -> dict[str, Any]:
        """See `Holder.held`."""
        return {"__class__": type(self.module)}

    def put(self, changed: Mapping[str, Any], removed: Iterable[Any] = ()) -> None:
        """See `Holder.put`."""
        for kind in changed.values():
            self.module.__class__ = kind


class Attributes:
    """What the classes and attributes of modules hold, and what containers and objects in them hold, at one time.

    Args:
        module: The outermost module.
        outer: What the modules' code reaches besides.
    """

    def __init__(self, module: nn.Module, outer: Outer | None = None) -> None:
        # By identity: its name up to the root, the root, the way from there, itself, and what it holds.
        self._saved: dict[Any, tuple[str, Any, tuple[tuple[Any, int], ...], Any, dict[Any, Any]]] = {}
        for prefix, child in module.named_modules():
            kind = ModuleClass(child)
            self._saved[kind.key] = (prefix, kind, (), kind, kind.held())
            self._walk(prefix, child.__dict__, None)
        for path, holder in outer.objects if outer else ():
            self._saved.setdefault(id(holder), (path, holder, (), holder, held_in(holder)))
        for variable in outer.variables if outer else ():
            self._walk(variable.path.rpartition(".")[0], variable, is_ours)

    def _walk(self, name: str, root: Any, follows: Callable[[Any], bool] | None) -> None:
        stack: list[tuple[tuple[tuple[Any, int], ...], Any]] = [((), root)]
        passed = set[Any]()
        while stack:
            way, holder = stack.pop()
            identity = identity_of(holder)
            if identity in self._saved or identity in passed:
                continue
            content = held_in(holder)
            if self._is_saved(holder):
                self._saved[identity] = (name, root, way, holder, content)
            else:
                passed.add(identity)
            for label, item in content.items() if not isinstance(holder, _WHOLE) else ():
                inner = holders_in(item)
                if inner and (follows is None or follows(item) or isinstance(item, GENERATORS)):
                    stack += [((*way, (label, which)), found) for which, found in enumerate(inner)]

    def _is_saved(self, holder: Any) -> bool:
        is_in_namespace = isinstance(holder, Named) and id(holder.holder) in self._saved
        return not is_in_namespace and not is_unchangeable(holder)

    @property
    def holders(self) -> frozenset[Any]:
        """Identities of the namespaces, containers and variables."""
        return frozenset(self._saved)

    def restore(self) -> None:
        """Puts everything back in place."""
        for _, _, _, holder, content in self._saved.values():
            now = held_in(holder)
            if not is_same(holder, content, now):
                put_into(holder, content, [label for label in now if label not in content])

    def changes(self) -> list[Change]:
        """Lists what is held differently now."""
        found: list[Change] = []
        for name, root, way, holder, before in self._saved.values():
            now = held_in(holder)
            if is_same(holder, before, now):
                continue
            path = functools.reduce(_joined, (label for label, _ in way), name)
            for label in dict.fromkeys([*before, *now]):
                if before.get(label) is not now.get(label):
                    values = before.get(label), now.get(label)
                    where = HolderPlace(root, way), label not in before
                    found.append(Change(_joined(path, label), holder, label, *values, *where))
        return found


def _joined(name: str, label: Any) -> str:
    if label is ...:
        return name
    return f"{name}.{label}" if name else str(label)


def is_same(holder: Any, left: dict[Any, Any], right: dict[Any, Any]) -> bool:
    """Tells whether a holder holds the same at two times."""
    if left.keys() != right.keys():
        return False
    if all(map(is_, left.values(), right.values())) and all(map(is_, left, right)):
        return True  # as nearly always: in the same order too
    if isinstance(holder, _WHOLE):
        return is_equal(left[...], right[...])
    return all(left[k] is right[k] for k in left)
