"""Tells at little cost whether anything that a capture read has changed since it was last compared."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from types import CellType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from megatrain.tracer.packing import namespaces, packing_key
from megatrain.tracer.python.attributes import GLOBAL_HOOKS, HOOKS
from megatrain.tracer.python.contents import BUFFERS, MISSING, GeneratorState, ObjectSlots, holders_in
from megatrain.tracer.python.snapshot import Contents, Kept, parts_of

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_registries = itemgetter(*_REGISTRIES)
_values = methodcaller("values")
_get: Callable[..., Any] = dict[str, Any].get
_facts = attrgetter("requires_grad", "shape", "dtype")


class Watch:
    """Holds what was there, object by object; as long as each is still the same object, nothing has changed.

    An unchanged watch answers in tens of nanoseconds per object, in loops that run in C. One that has changed says no
    more than that: an equal value may have taken the place of another.
    """

    def __init__(self) -> None:
        self._namespaces: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._named: list[Any] = []
        self._cells: list[tuple[CellType, Any]] = []
        # Of all containers one behind the other: what they yield, and what dictionaries hold under these keys.
        self._containers: list[Any] = []
        self._sizes: list[int] = []
        self._yielded: list[Any] = []
        self._mappings: list[Any] = []
        self._values: list[Any] = []
        self._empty: list[Any] = []
        self._slots: list[tuple[ObjectSlots, list[Any]]] = []
        self._compared: list[tuple[Kept, Any]] = []

    def add_name(self, namespace: dict[str, Any], name: str) -> None:
        """Watches which object `name` stands for, in a namespace where much else may change."""
        self._namespaces.append(namespace)
        self._names.append(name)
        self._named.append(namespace.get(name, MISSING))

    def add_cell(self, cell: CellType, value: Any) -> None:
        """Watches a variable of a closure, which holds `value`."""
        self._cells.append((cell, value))

    def add_container(self, container: Any) -> None:
        """Watches all keys and values of a dictionary, or all items of another container."""
        if not container:
            self._empty.append(container)
            return
        self._containers.append(container)
        self._sizes.append(len(container))
        self._yielded += container
        if hasattr(container, "values"):
            self._mappings.append(container)
            self._values += container.values()

    def add_parts(self, pairs: Iterable[tuple[Kept, Any]]) -> None:
        """Watches what these values hold, at any depth."""
        for kept, value in parts_of(pairs):
            if not isinstance(kept, Contents):
                self._compared.append((kept, value))
                continue
            is_odd = isinstance(value, BUFFERS) or type(getattr(value, "__dict__", {})) is not dict
            if is_odd or (type(value) is OrderedDict and kept.attributes):
                self._compared.append((kept, value))
                continue
            for holder in holders_in(value):
                if isinstance(holder, ObjectSlots):
                    self._slots.append((holder, list(holder.held().values())))
                elif not isinstance(holder, tuple | frozenset | GeneratorState):
                    self.add_container(holder)

    def is_unchanged(self) -> bool:
        """Tells whether everything is the same object still."""
        found = map(_get, self._namespaces, self._names, [MISSING] * len(self._names))
        return (
            all(map(is_, found, self._named))
            and not any(self._empty)
            and list(map(len, self._containers)) == self._sizes
            and all(map(is_, chain.from_iterable(self._containers), self._yielded))
            and all(map(is_, chain.from_iterable(map(_values, self._mappings)), self._values))
            and all(_contents(cell) is value for cell, value in self._cells)
            and all(_is_same_list(list(slots.held().values()), values) for slots, values in self._slots)
            and all(kept.difference(value, set()) is None for kept, value in self._compared)
        )


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _is_same_list(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(is_, left, right))


class ModelWatch:
    """Notices at little cost when the modules of a model, their classes, registries, hooks or modes have changed.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.version = 0
        self.shapes_version = 0
        self._specs: Hashable = None
        self._signature: Hashable = None
        self._renew()

    def signature(self) -> Hashable:
        """Returns the modes of the modules, the state's shapes, which parameters are trained, and which are tied.

        Afterwards `version` is another one if anything in the modules' registries, hooks or names changed, and
        `shapes_version` if the state has other shapes or dtypes.
        """
        if not self._has_same_modules():
            self._renew()
        elif not self._has_same_modes():
            self._read()
        return self._signature

    def _renew(self) -> None:
        self.version += 1
        self._modules = list(self._model.modules())
        self._kinds = list(map(type, self._modules))
        self._own = list(map(vars, self._modules))
        self._lengths = list(map(len, self._own))
        # A new name stands last.
        self._latest = list(map(next, map(reversed, self._own)))
        self._watch = Watch()
        for own in self._own:
            for name in (*_REGISTRIES, *HOOKS):
                self._watch.add_container(own[name])
            for name in HOOKS:
                if own[name]:
                    self._watch.add_name(own, name)
        self._registries = list(chain.from_iterable(map(_registries, self._own)))
        for hooks in GLOBAL_HOOKS:
            self._watch.add_container(hooks)
        self._registered = [x for own in self._own for name in _REGISTRIES[:2] for x in own[name].values()]
        for tensor in self._registered:
            for namespace in () if tensor is None else namespaces(tensor):
                self._watch.add_container(namespace)
        # Those of lazy modules have no shape yet; a capture refuses them.
        self._tensors = [x for x in self._registered if isinstance(x, torch.Tensor) and not is_lazy(x)]
        self._read()

    def _has_same_modules(self) -> bool:
        return (
            list(map(type, self._modules)) == self._kinds
            and list(map(len, self._own)) == self._lengths
            and list(map(next, map(reversed, self._own))) == self._latest
            and all(map(is_, chain.from_iterable(map(_registries, self._own)), self._registries))
            and self._watch.is_unchanged()
        )

    def _has_same_modes(self) -> bool:
        modes = [own.get("training") for own in self._own]
        return modes == self._modes and list(map(_facts, self._tensors)) == self._known

    def _read(self) -> None:
        self._modes = [own.get("training") for own in self._own]
        self._known = list(map(_facts, self._tensors))
        first_seen: dict[int, int] = {}
        state: list[tuple[int, bool] | None] = []
        specs: dict[int, Hashable] = {}
        for tensor in self._registered:
            if tensor is None:
                state.append(None)
            elif isinstance(tensor, torch.Tensor):
                state.append((first_seen.setdefault(id(tensor), len(state)), tensor.requires_grad))
                specs[len(state)] = (
                    None if is_lazy(tensor) else (tuple(tensor.shape), tensor.dtype, packing_key(tensor))
                )
        self._signature = tuple(self._modes), tuple(state), tuple(specs.items())
        if self._specs != tuple(specs.values()):
            self._specs = tuple(specs.values())
            self.shapes_version += 1
