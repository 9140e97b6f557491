"""Runs a model's forward on fake state and leaves no trace of it in the model."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from megatrain.device import present_accelerator
from megatrain.patches import replaced_elsewhere
from megatrain.torch_private import FakeTensorMode
from megatrain.tracer.equal import is_equal
from megatrain.tracer.kept import MISSING
from megatrain.tracer.named import Named
from megatrain.tracer.outer import Outer, is_ours
from megatrain.tracer.own_code import original
from megatrain.tracer.rng import is_ahead

_REGISTRIES = ("_parameters", "_buffers")
_SHOWN = ("__dict__", *_REGISTRIES)
HOST_GENERATORS = "random or numpy.random"
_CONTAINERS = (dict, list, set, deque)
_SCALARS = (bool, int, float, str, type(None))
# What is longer is data that a module refers to, a vocabulary or a data set, and not its state.
_LARGEST = 4096


def fake_state(
    tensors: dict[str, torch.Tensor], fake_mode: FakeTensorMode, device: torch.device
) -> dict[str, torch.Tensor]:
    """Makes a fake tensor on `device` for each state tensor, with the same layout and `requires_grad`."""
    fakes: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        with fake_mode, torch.no_grad():
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            attributes: dict[str, Any] = vars(fake)
            attributes |= {k: v for k, v in vars(tensor).items() if k not in attributes}
        elif tensor.requires_grad and tensor.is_leaf:
            fake.requires_grad_()
        fakes[key] = fake
    return fakes


@contextmanager
def swapped_state(
    module: nn.Module, replacement: dict[int, torch.Tensor], outer: Outer | None = None
) -> Generator[Attributes]:
    """Lets this thread find `replacement[id(tensor)]` where `module` holds a tensor.

    Modules get registries of their own for the body, so that the model's own ones are never touched: other threads go
    on finding those. At the end all changes are undone. Yields what the modules, and what their code reaches besides,
    held right after the swap.
    """
    saved = Attributes(module, outer)
    own: dict[int, dict[str, dict[str, Any]]] = {
        id(child): {kind: vars(child)[kind] for kind in _REGISTRIES} for child in module.modules()
    }
    stand_ins: dict[int, dict[str, Any]] = {}
    for held in [held for kinds in own.values() for held in kinds.values()]:
        if id(held) not in stand_ins:
            stand_in = stand_ins[id(held)] = copy.copy(held)
            stand_in.update({name: replacement.get(id(tensor), tensor) for name, tensor in held.items()})

    def showing_own(find: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def look_up(other: Any, name: str) -> Any:
            found = find(other, name)
            kinds = own.get(id(original(other))) if name in _SHOWN else None
            if kinds is None:
                return found
            return {**found, **kinds} if name == "__dict__" else kinds[name]

        return look_up

    with replaced_elsewhere(nn.Module, "__getattribute__", showing_own):
        try:
            for child in module.modules():
                for kind, held in own[id(child)].items():
                    vars(child)[kind] = stand_ins[id(held)]
            yield Attributes(module, outer)
        finally:
            saved.restore()


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


@dataclass(frozen=True, slots=True, eq=False)
class HostRng:
    """State of the generators of Python and of NumPy."""

    python: tuple[Any, ...]
    numpy: Any

    @staticmethod
    def now() -> HostRng:
        """Reads the generators."""
        return HostRng(random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Sets the generators back to this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostRng) or self.python != other.python:
            return False
        return self.numpy[2:] == other.numpy[2:] and bool((self.numpy[1] == other.numpy[1]).all())

    def __hash__(self) -> int:
        return hash(self.python)


@contextmanager
def kept_rng(*, others_draw: bool = False) -> Generator[list[str]]:
    """Restores every random generator at the end; the list then names what moved besides torch's stream.

    Args:
        others_draw: What other threads drew meanwhile stays drawn. The body draws nothing from torch's generator on the
            CPU then, and its caller sees to those of Python and NumPy.
    """
    host, cpu = HostRng.now(), torch.get_rng_state()
    seed = torch.initial_seed()
    accelerator = present_accelerator()
    device = None if accelerator is None else accelerator.generator_state()
    moved: list[str] = []
    try:
        yield moved
    finally:
        if host != HostRng.now():
            moved.append(HOST_GENERATORS)
        if torch.initial_seed() != seed:
            moved.append("torch.manual_seed")
        if not others_draw:
            host.restore()
        if not (others_draw and is_ahead(cpu, torch.get_rng_state())):
            torch.set_rng_state(cpu)
        if accelerator is not None and device is not None:
            accelerator.set_generator_state(device)
