"""Tells at little cost whether anything that a capture read, or the modules themselves, changed since a comparison."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy

from megatrain.tracer.packing import namespaces, packing_key
from megatrain.tracer.python.python_values import (
    BUFFERS,
    HOLDERS,
    MISSING,
    GeneratorState,
    held_in,
    holders_in,
    is_same,
)
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
        # Of all containers one after the other: what they yield, and what dictionaries hold under these keys.
        self._containers: list[Any] = []
        self._sizes: list[int] = []
        self._yielded: list[Any] = []
        self._mappings: list[Any] = []
        self._values: list[Any] = []
        self._empty: list[Any] = []
        self._others: list[tuple[Any, dict[Any, Any]]] = []
        self._compared: list[tuple[Kept, Any]] = []

    def add_name(self, namespace: dict[str, Any], name: str) -> None:
        """Watches which object `name` stands for, in a namespace where much else may change."""
        self._namespaces.append(namespace)
        self._names.append(name)
        self._named.append(namespace.get(name, MISSING))

    def add(self, holder: Any) -> None:
        """Watches all that a holder holds."""
        if isinstance(holder, HOLDERS):
            self._others.append((holder, held_in(holder)))
        elif not holder:
            self._empty.append(holder)
        else:
            self._containers.append(holder)
            self._sizes.append(len(holder))
            self._yielded += holder
            if hasattr(holder, "values"):
                self._mappings.append(holder)
                self._values += holder.values()

    def add_parts(self, pairs: Iterable[tuple[Kept, Any]]) -> None:
        """Watches what these values hold, at any depth."""
        for kept, value in parts_of(pairs):
            is_odd = isinstance(value, BUFFERS) or type(getattr(value, "__dict__", {})) is not dict
            if not isinstance(kept, Contents) or is_odd or (type(value) is OrderedDict and kept.attributes):
                self._compared.append((kept, value))
                continue
            for holder in holders_in(value):
                if not isinstance(holder, tuple | frozenset | GeneratorState):
                    self.add(holder)

    def is_unchanged(self) -> bool:
        """Tells whether everything is the same object still."""
        found = map(_get, self._namespaces, self._names, [MISSING] * len(self._names))
        return (
            all(map(is_, found, self._named))
            and not any(self._empty)
            and list(map(len, self._containers)) == self._sizes
            and all(map(is_, chain.from_iterable(self._containers), self._yielded))
            and all(map(is_, chain.from_iterable(map(_values, self._mappings)), self._values))
            and all(is_same(holder, held, held_in(holder)) for holder, held in self._others)
            and all(kept.difference(value) is None for kept, value in self._compared)
        )


# Hooks that change what a forward does, by the attribute that holds them.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOK_OPTIONS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(
    getattr(torch_module, f"_global{name}") for name in (*HOOKS, *_HOOK_OPTIONS[1:])
)


@dataclass(frozen=True, slots=True, eq=False)
class ModuleNode:
    """One module of a tree, which isn't kept alive, with the names of what it registers, its children and hooks."""

    path: str
    module: weakref.ref[nn.Module]
    kind: type
    registered: tuple[tuple[str, ...], tuple[str, ...]]
    children: tuple[tuple[str, Any], ...]
    hooks: tuple[tuple[Any, ...], ...]

    @staticmethod
    def of(path: str, module: nn.Module) -> ModuleNode:
        """Reads what `module` has now."""
        children = tuple((n, None if c is None else weakref.ref(c)) for n, c in module._modules.items())
        registered = tuple(module._parameters), tuple(module._buffers)
        return ModuleNode(path, weakref.ref(module), type(module), registered, children, _hooks(module))

    def failure(self) -> str | None:
        """Returns what is different now, or None."""
        module = self.module()
        if module is None:
            return f"{self.path} is another module now"
        if type(module) is not self.kind:
            return f"{self.path} is of class {type(module).__qualname__} now, not {self.kind.__qualname__}"
        now = list(module._modules.items())
        for (name, child), (name_now, child_now) in zip(self.children, now, strict=False):
            if name != name_now or (child_now is not None if child is None else child() is not child_now):
                return f"{self.path}.{name} is another module now"
        if len(now) != len(self.children):
            return f"{self.path} has {len(now)} children, not {len(self.children)}"
        if (tuple(module._parameters), tuple(module._buffers)) != self.registered:
            return f"{self.path} registers other parameters or buffers now"
        return f"{self.path} has other hooks now" if not _are_same(_hooks(module), self.hooks) else None


@dataclass(frozen=True, slots=True, eq=False)
class ModuleTree:
    """All modules of a model, parents first, and the hooks that torch runs for every module."""

    nodes: tuple[ModuleNode, ...]
    global_hooks: tuple[tuple[Any, ...], ...]

    @staticmethod
    def of(model: nn.Module) -> ModuleTree:
        """Reads the modules of `model` as they are now."""
        named = ((f"model.{name}" if name else "model", module) for name, module in model.named_modules())
        nodes = (ModuleNode.of(path, module) for path, module in named)
        return ModuleTree(tuple(nodes), _global_hooks())

    def failure(self) -> str | None:
        """Returns what is different now, or None."""
        if not _are_same(_global_hooks(), self.global_hooks):
            return "torch runs other hooks for every module now"
        return next((f for f in map(ModuleNode.failure, self.nodes) if f is not None), None)

    def paths(self) -> dict[int, str]:
        """Returns the first path of each module, by identity."""
        return {id(node.module()): node.path for node in self.nodes}


def _hooks(module: nn.Module) -> tuple[tuple[Any, ...], ...]:
    held = [getattr(module, name) for name in HOOKS]
    if not any(held):
        return ()
    return (*(tuple(h.values()) for h in held), *(tuple(getattr(module, name)) for name in _HOOK_OPTIONS))


def _global_hooks() -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(hooks.values()) for hooks in GLOBAL_HOOKS)


def _are_same(left: tuple[tuple[Any, ...], ...], right: tuple[tuple[Any, ...], ...]) -> bool:
    return len(left) == len(right) and all(
        len(a) == len(b) and all(x is y or (isinstance(x, int) and x == y) for x, y in zip(a, b, strict=True))
        for a, b in zip(left, right, strict=True)
    )


class ModelWatch:
    """Notices at little cost when the modules of a model, their classes, registries, hooks or modes have changed.

    Attributes:
        parameters: Of all modules, when `signature` was last asked for; one that is tied several times.
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
                self._watch.add(own[name])
            for name in HOOKS:
                if own[name]:
                    self._watch.add_name(own, name)
        self._registries = list(chain.from_iterable(map(_registries, self._own)))
        for hooks in GLOBAL_HOOKS:
            self._watch.add(hooks)
        self.parameters = [x for own in self._own for x in own["_parameters"].values() if x is not None]
        self._registered = [x for own in self._own for name in _REGISTRIES[:2] for x in own[name].values()]
        for tensor in self._registered:
            for namespace in () if tensor is None else namespaces(tensor):
                self._watch.add(namespace)
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
