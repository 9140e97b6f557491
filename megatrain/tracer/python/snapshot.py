"""What Python state was at one time: which places hold something else now, put back; which values are equal still."""

from __future__ import annotations

import copy
import functools
import io
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from megatrain.base.torch_private import FakeTensor
from megatrain.tracer.python.names import Outer
from megatrain.tracer.python.python_values import (
    BARE,
    BUFFERS,
    CONTAINERS,
    GENERATORS,
    LARGEST,
    MISSING,
    SIMPLE,
    VALUES,
    WHOLE,
    Missing,
    ModuleClass,
    Named,
    held_in,
    holders_in,
    identity_of,
    is_copied,
    is_plain,
    is_same,
    is_unchangeable,
    items_of,
    put_into,
    vars_of,
)
from megatrain.tracer.source_line import file_of, is_library
from megatrain.tracer.spec import TensorSpec, is_equal


def _is_ours(value: Any) -> bool:
    """Tells whether what an object holds may be the model's state, rather than a library's own affairs."""
    kind = type(value)
    if kind is SimpleNamespace or kind.__module__ == "builtins" or isinstance(value, (*CONTAINERS, *GENERATORS)):
        return True
    return not is_library(file_of(kind))


@dataclass(frozen=True, slots=True)
class Change:
    """What holds another object now, None for nothing; `is_added` says that nothing was there before, not even None."""

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


class Snapshot:
    """What the classes and attributes of modules hold, and what containers and objects in them hold, at one time."""

    def __init__(self, module: nn.Module, outer: Outer | None = None) -> None:
        # By identity: its name up to the root, the way from there, itself, and what it holds.
        self._saved: dict[Any, tuple[str, HolderPlace, Any, dict[Any, Any]]] = {}
        for prefix, child in module.named_modules():
            kind = ModuleClass(child)
            self._saved[identity_of(kind)] = prefix, HolderPlace(kind), kind, held_in(kind)
            self._walk(prefix, child.__dict__, None)
        for path, holder in outer.objects if outer else ():
            self._saved.setdefault(id(holder), (path, HolderPlace(holder), holder, held_in(holder)))
        for variable in outer.variables if outer else ():
            self._walk(variable.path.rpartition(".")[0], variable, _is_ours)

    def _walk(self, name: str, root: Any, follows: Callable[[Any], bool] | None) -> None:
        stack: list[tuple[tuple[tuple[Any, int], ...], Any]] = [((), root)]
        passed = set[Any]()
        while stack:
            way, holder = stack.pop()
            identity = identity_of(holder)
            if identity in self._saved or identity in passed:
                continue
            content = held_in(holder)
            if type(holder) in BARE:  # as most holders
                self._saved[identity] = name, HolderPlace(root, way), holder, content
            else:
                is_in_namespace = isinstance(holder, Named) and id(holder.holder) in self._saved
                if is_in_namespace or is_unchangeable(holder):
                    passed.add(identity)
                else:
                    self._saved[identity] = name, HolderPlace(root, way), holder, content
                if isinstance(holder, WHOLE):
                    continue
            for label, item in content.items():
                if type(item) in SIMPLE:
                    continue
                inner = holders_in(item)
                if inner and (follows is None or follows(item)):
                    stack += [((*way, (label, which)), found) for which, found in enumerate(inner)]

    @property
    def holders(self) -> frozenset[Any]:
        """Identities of the namespaces, containers and variables."""
        return frozenset(self._saved)

    def with_registries(self, module: nn.Module, others: Mapping[int, dict[str, Any]]) -> Snapshot:
        """Returns what `module` holds once its modules have been given other registries in place of these.

        Args:
            others: What now stands for a registry, by the identity of the one that was there.
        """
        found = Snapshot(nn.Module())
        found._saved = {}
        for identity, (name, place, holder, content) in self._saved.items():
            if identity in others:
                holder = others[identity]
                identity, content = id(holder), dict(holder)
            found._saved[identity] = name, place, holder, content
        for child in module.modules():
            name, place, holder, content = found._saved[id(vars(child))]
            now = {label: others.get(id(value), value) for label, value in content.items()}
            found._saved[id(vars(child))] = name, place, holder, now
        return found

    def restore(self) -> None:
        """Puts everything back in place."""
        for _, _, holder, content in self._saved.values():
            now = held_in(holder)
            if not is_same(holder, content, now):
                put_into(holder, content, [label for label in now if label not in content])

    def changes(self) -> list[Change]:
        """Lists what is held differently now."""
        found: list[Change] = []
        for name, place, holder, before in self._saved.values():
            now = held_in(holder)
            if is_same(holder, before, now):
                continue
            path = functools.reduce(_joined, (label for label, _ in place.labels), name)
            for label in dict.fromkeys([*before, *now]):
                old, new = before.get(label), now.get(label)
                if old is not new:
                    found.append(Change(_joined(path, label), holder, label, old, new, place, label not in before))
        return found


def _joined(name: str, label: Any) -> str:
    if label is ...:
        return name
    return f"{name}.{label}" if name else str(label)


# A value that another may stand for later.

_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, staticmethod, classmethod, property)
# How many objects may lie in each other, and how many containers count as one.
_DEEPEST, _CONTAINER_DEPTH = 8, 0.125
# Rarely does a forward depend on more; beyond this the rest is told by identity.
_MOST = 50_000


class Keeper:
    """Makes `Kept` of values; a value that several places hold is kept once."""

    def __init__(self, constants: Collection[int] = ()) -> None:
        self._constants = constants
        self._known: dict[int, tuple[Any, Kept]] = {}

    def keep(self, value: Any, depth: float = 0) -> Kept:
        """Returns what `value` is now."""
        if isinstance(value, VALUES) and not isinstance(value, Enum):
            return KeptValue(value)
        known = self._known.get(id(value))
        if known is None:
            known = (value, self._kept(value, depth))
            self._known[id(value)] = known
        return known[1]

    def _kept(self, value: Any, depth: float) -> Kept:
        if isinstance(value, torch.Tensor):
            return TensorLike.of(value, id(value) in self._constants)
        is_buffer = isinstance(value, (*BUFFERS, np.generic)) and is_copied(value)
        if is_buffer and not (isinstance(value, np.ndarray) and value.dtype.hasobject):
            return KeptValue(copy.copy(value))
        is_code = isinstance(value, (*_CODE, nn.Module, Enum))
        if is_code or depth > _DEEPEST or len(self._known) > _MOST:
            return Same(value, is_cut=not is_code)
        return self._contents(value, depth, is_container=is_buffer or isinstance(value, CONTAINERS))

    def _contents(self, value: Any, depth: float, *, is_container: bool) -> Kept:
        if not is_container and not hasattr(value, "__dict__") and not hasattr(type(value), "__slots__"):
            # Of what is written in C, functions and what has a hash of its own don't change.
            return Same(value, is_cut=not callable(value) and type(value).__hash__ in (None, object.__hash__))
        items, attributes = items_of(value), vars_of(value)
        if len(items) + len(attributes) > LARGEST:
            return Same(value, is_cut=True)
        kind = type(value)
        is_open = kind in CONTAINERS or isinstance(value, tuple | OrderedDict)
        is_ordinary = kind is SimpleNamespace or kind.__new__ is object.__new__
        has_hidden_parts = not (is_open if is_container else is_ordinary)
        kept = Contents(kind, Same(value) if has_hidden_parts else None)
        self._known[id(value)] = (value, kept)  # for objects that hold themselves
        depth += _CONTAINER_DEPTH if is_container else 1
        kept.items.update({k: self.keep(v, depth) for k, v in items.items()})
        kept.attributes.update({k: self.keep(v, depth) for k, v in attributes.items()})
        return kept


_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}"), set: ("{", "}"), frozenset: ("frozenset({", "})"),
}  # fmt: skip
_LONGEST_TEXT = 80


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where a value isn't what it was."""

    path: str
    expected: Any
    now: Any


class Kept:
    """What a value was. Each subclass says in `is_same` what makes another value stand for the same."""

    __slots__ = ()

    def is_same(self, now: Any) -> bool:
        """Tells whether `now` is the same as far as this alone can tell."""
        raise NotImplementedError

    def difference(self, now: Any, seen: set[tuple[int, int]] | None = None) -> Mismatch | None:
        """Returns where `now` is something else, or None; pairs of identities in `seen` are known to be equal."""
        return None if self.is_same(now) else Mismatch("", self, now)


@dataclass(frozen=True, slots=True, eq=False)
class KeptValue(Kept):
    """A number, a text, a dtype, a copy of an array."""

    value: Any

    def is_same(self, now: Any) -> bool:
        """Equal values of one type are the same."""
        return type(now) is type(self.value) and is_equal(now, self.value)

    def __str__(self) -> str:
        if isinstance(self.value, np.ndarray | np.generic):
            return f"is an array {self.value.dtype}{list(self.value.shape)}"
        return f"== {self.value!r}"


class Same(Kept):
    """An object that only itself stands for: a function, a module, a lock. It is not kept alive.

    Args:
        is_cut: It may hold what can change, and nobody looks into it.

    Attributes:
        is_iterator: Each read of it changes it, and nothing tells what it holds.
    """

    __slots__ = ("_ref", "_size", "_text", "is_cut", "is_iterator")

    def __init__(self, value: Any, *, is_cut: bool = False) -> None:
        self.is_cut = is_cut
        self.is_iterator = isinstance(value, Iterator) and not isinstance(value, io.IOBase)
        try:
            self._ref: Any = weakref.ref(value)
        except TypeError:
            self._ref = lambda: value
        self._size = len(value) if isinstance(value, CONTAINERS) else None
        self._text = name_of(value)

    def is_same(self, now: Any) -> bool:
        """Itself, of the same size if it is a container."""
        return now is not None and self._ref() is now and (self._size is None or len(now) == self._size)

    def __str__(self) -> str:
        return f"is {self._text}" + (f" of {self._size}" if self._size is not None else "")


@dataclass(frozen=True, slots=True, eq=False)
class TensorLike(Kept):
    """A tensor that no module registers: its values matter only where it is a constant of the graph."""

    described: tuple[Any, ...]
    constant: Same | None

    @staticmethod
    def of(tensor: torch.Tensor, is_constant: bool) -> TensorLike:
        """Reads what Python code can ask of `tensor` without its values."""
        kind = torch.Tensor if isinstance(tensor, FakeTensor) else type(tensor)  # it stands for a tensor of a step
        return TensorLike(_described(tensor, kind), Same(tensor) if is_constant else None)

    def is_same(self, now: Any) -> bool:
        """One of the same class, shape and device."""
        if self.constant is not None and not self.constant.is_same(now):
            return False
        return isinstance(now, torch.Tensor) and _described(now, type(now)) == self.described

    def __str__(self) -> str:
        return f"is {'the' if self.constant else 'a'} tensor {self.described[1]}"


def _described(tensor: torch.Tensor, kind: type) -> tuple[Any, ...]:
    return kind, TensorSpec.of(tensor), tensor.device, tensor.requires_grad


@dataclass(slots=True, eq=False)
class Contents(Kept):
    """A container or a plain object; also `itself`, where its type may hold more than can be seen."""

    kind: type
    itself: Same | None
    items: dict[Any, Kept] = field(default_factory=dict[Any, Kept])
    attributes: dict[str, Kept] = field(default_factory=dict[str, Kept])

    def is_same(self, now: Any) -> bool:
        """Another of its type with the same keys."""
        if type(now) is not self.kind or (self.itself is not None and not self.itself.is_same(now)):
            return False
        if isinstance(now, set | frozenset):
            return set(map(_told_apart, now)) == set(map(_told_apart, self.items))
        keys = list(items_of(now))
        return keys == list(self.items) and list(map(type, keys)) == list(map(type, self.items))

    def difference(self, now: Any, seen: set[tuple[int, int]] | None = None) -> Mismatch | None:
        """Returns the first place where `now` holds something else, at any depth, or None."""
        seen = set() if seen is None else seen
        if (id(self), id(now)) in seen:
            return None
        seen.add((id(self), id(now)))
        if not self.is_same(now):
            return Mismatch("", self, now)
        # Members of a set are their own keys: NaN would not be found, and equal ones were compared already.
        is_set = isinstance(now, set | frozenset)
        items = ({}, {}, "") if is_set else (self.items, items_of(now), "[{!r}]")
        for held, there, form in (items, (self.attributes, vars_of(now), ".{}")):
            for label in dict.fromkeys([*held, *there]):
                kept = held.get(label) or KeptValue(MISSING)
                found = kept.difference(there.get(label, MISSING), seen)
                if found is not None:
                    return Mismatch(form.format(label) + found.path, found.expected, found.now)
        return None

    def parts(self) -> Iterator[tuple[str, Kept]]:
        """Yields what it holds, with the path there."""
        for held, form in ((self.items, "[{!r}]"), (self.attributes, ".{}")):
            yield from ((form.format(label), kept) for label, kept in held.items())

    def __str__(self) -> str:
        literal = _literal(self)
        if literal is not None and len(literal) <= _LONGEST_TEXT:
            return f"== {literal}"
        size = f" of {len(self.items)}" if issubclass(self.kind, CONTAINERS) else ""
        return f"is {_article(self.kind.__qualname__)}{size}"


def parts_of(pairs: Iterable[tuple[Kept, Any]]) -> Iterator[tuple[Kept, Any]]:
    """Yields what `pairs` compare, and all that it holds and that may change, each object once."""
    stack, met = list(pairs), set[int]()
    while stack:
        kept, value = stack.pop()
        can_change = not isinstance(kept, KeptValue | Same) or isinstance(value, BUFFERS)
        if can_change and id(value) not in met:
            met.add(id(value))
            yield kept, value
            if isinstance(kept, Contents):
                for held, there in ((kept.items, items_of(value)), (kept.attributes, vars_of(value))):
                    stack += [(inner, there[label]) for label, inner in held.items() if label in there]


def _told_apart(value: Any) -> tuple[type, Any]:
    """What equal members of two sets have in common, as `is_equal` has it."""
    return type(value), repr(value) if isinstance(value, float | complex) else value


def name_of(value: Any) -> str:
    """Names an object without its address: its own name if it has one, else its type."""
    own = getattr(value, "__qualname__", None)
    if isinstance(own, str):
        return f"{getattr(value, '__module__', None) or 'builtins'}.{own}"
    if isinstance(value, Enum):
        return str(value)
    return _article(type(value).__qualname__)


def value_text(value: Any) -> str:
    """Prints a value without addresses: itself if it is plain, else what it is."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {TensorSpec.of(value)}"
    if isinstance(value, Missing):
        return "missing"
    text = repr(value) if is_plain(value) else ""
    return text if 0 < len(text) <= _LONGEST_TEXT else name_of(value)


def _article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _literal(kept: Kept) -> str | None:
    """Prints a container of plain values as Python, sets in order; None for all else."""
    if isinstance(kept, KeptValue):
        return repr(kept.value)
    if not isinstance(kept, Contents) or kept.kind not in _BRACKETS:
        return None
    parts = [_literal(item) for item in kept.items.values()]
    if None in parts:
        return None
    texts = [str(part) for part in parts]
    if kept.kind is dict:
        texts = [f"{key!r}: {text}" for key, text in zip(kept.items, texts, strict=True)]
    if kept.kind in (set, frozenset):
        texts.sort()
    left, right = _BRACKETS[kept.kind]
    return f"{left}{', '.join(texts)}{',' if kept.kind is tuple and len(texts) == 1 else ''}{right}"
