"""What Python values are made of: the one way to look into containers and objects, and to put something back."""

from __future__ import annotations

import copy
import dis
import functools
import pickle
import random
import sys
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import is_
from types import CellType, CodeType, FunctionType, MappingProxyType, MemberDescriptorType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from megatrain.tracer.source_line import SourceLine
from megatrain.tracer.spec import is_equal


class Missing:
    """Stands for an attribute that isn't there."""

    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()
VALUES = (
    bool, int, float, complex, str, bytes, type(None), type(...), range, slice, torch.dtype, torch.device,
    torch.layout, torch.memory_format, Missing,
)  # fmt: skip
"""Types of values that never change."""
CONTAINERS = (list, tuple, dict, set, frozenset, deque, MappingProxyType)
BUFFERS = (np.ndarray, bytearray, array)
"""Types of what holds numbers or bytes rather than objects."""
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
"""Types of random generators that are objects of the user's; each draw moves one."""
# What holds more is data that a model refers to, a vocabulary or a data set, rather than its state.
LARGEST = 4096
_LARGEST_BUFFER = 65536
_NOTHING = ()
_UNCHANGEABLE = (tuple, frozenset, MappingProxyType)
# Most of what a model holds is of these types; of the second, nothing but what they contain can be seen.
SIMPLE = frozenset((*VALUES, torch.Tensor, nn.Parameter, FunctionType))
BARE = frozenset((list, dict, set, deque, OrderedDict))
# Visited on their own, or never looked into.
_CLOSED = (nn.Module, torch.Tensor, type, ModuleType, FunctionType, Enum)


# What may hold something that is replaced is a *holder*: a namespace or a container, or one of the classes below.


@dataclass(frozen=True, slots=True, eq=False)
class ObjectSlots:
    """The attributes that an object keeps in slots."""

    value: Any
    members: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class GeneratorState:
    """The state of a random generator, as bytes under the label `...`."""

    generator: Any


@dataclass(frozen=True, slots=True, eq=False)
class ModuleClass:
    """The class of a module, which code may change: `torch.nn.utils.parametrize` does."""

    module: nn.Module


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """A variable, or an attribute of a module or class.

    Args:
        path: What messages call it: `SCALE`, `settings.SCALE`, `model.scale`.
        holder: The namespace it lives in, a closure's cell, or a module, which isn't kept alive.
        code: The code that names it, if it is a variable.
        line: The user's line that read it, if it is an attribute.
    """

    path: str
    holder: dict[str, Any] | type | CellType | weakref.ref[nn.Module]
    name: str
    code: CodeType | None = None
    line: SourceLine | None = None

    @property
    def module(self) -> nn.Module | None:
        """The module whose attribute it is; None for a variable, or if the module is gone."""
        return self.holder() if isinstance(self.holder, weakref.ref) else None

    @property
    def source(self) -> SourceLine | None:
        """The first line that names or reads it."""
        if self.code is None:
            return self.line
        return SourceLine(self.code.co_filename, _line_of(self.code, self.name), self.code.co_qualname)

    def now(self) -> Any:
        """Returns what it holds now, without running any descriptor."""
        holder = self.holder
        if isinstance(holder, CellType):
            try:
                return holder.cell_contents
            except ValueError:  # nothing was assigned yet
                return MISSING
        if isinstance(holder, type):
            return next((vars(kind)[self.name] for kind in holder.__mro__ if self.name in vars(kind)), MISSING)
        namespace = holder if isinstance(holder, dict) else vars(module) if (module := holder()) is not None else {}
        return namespace.get(self.name, MISSING)

    def put(self, changed: Mapping[str, Any], removed: Iterable[Any]) -> None:
        """Assigns a value, or takes it away."""
        holder: Any = self.holder
        if isinstance(holder, dict):
            put_into(holder, changed, removed)
        elif isinstance(holder, CellType):
            if changed:
                holder.cell_contents = changed[self.name]
            elif self.now() is not MISSING:
                del holder.cell_contents
        else:
            for name in removed:
                delattr(holder, name)
            for name, value in changed.items():
                setattr(holder, name, value)


@functools.lru_cache(maxsize=4096)
def _line_of(code: CodeType, name: str) -> int:
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = (instruction.starts_line or line) if sys.version_info < (3, 13) else (instruction.line_number or line)
        if instruction.argval == name:
            return line
    return code.co_firstlineno


HOLDERS = (ObjectSlots, GeneratorState, ModuleClass, Named)
# What changes as a whole, however little of it does.
WHOLE = (*BUFFERS, GeneratorState)


def identity_of(holder: Any) -> Any:
    """Tells holders apart, however they were found, as long as what they are in is alive."""
    if type(holder) in BARE:
        return id(holder)  # as most holders
    if isinstance(holder, Named):
        return id(holder.holder), holder.name
    if isinstance(holder, ObjectSlots):
        return id(holder.value), ObjectSlots
    if isinstance(holder, GeneratorState):
        return id(holder.generator), GeneratorState
    return (id(holder.module), ModuleClass) if isinstance(holder, ModuleClass) else id(holder)


def held_in(holder: Any) -> dict[Any, Any]:
    """Returns what a holder holds now, by label; a buffer holds all of its numbers together."""
    if type(holder) in (dict, OrderedDict):
        return dict(holder)
    if isinstance(holder, ObjectSlots):
        return _slotted(holder.value, holder.members)
    if isinstance(holder, GeneratorState):
        return {...: pickle.dumps(_state_of(holder.generator))}
    if isinstance(holder, ModuleClass):
        return {"__class__": type(holder.module)}
    if isinstance(holder, Named):
        return {} if (value := holder.now()) is MISSING else {holder.name: value}
    return {...: copy.copy(holder)} if isinstance(holder, BUFFERS) else items_of(holder)


def put_into(holder: Any, changed: Mapping[Any, Any], removed: Iterable[Any] = ()) -> None:
    """Puts values into a holder: those that have changed into what has names, all of them into a list or set."""
    if isinstance(holder, dict):
        # One by one: another thread may be reading what hasn't changed.
        for label in removed:
            holder.pop(label, None)
        holder.update(changed)
    elif isinstance(holder, Named):
        holder.put(changed, removed)
    elif isinstance(holder, ObjectSlots):
        for name in removed:
            holder.members[name].__delete__(holder.value)
        for name, value in changed.items():
            holder.members[name].__set__(holder.value, value)
    elif isinstance(holder, ModuleClass):
        for kind in changed.values():
            holder.module.__class__ = kind
    elif isinstance(holder, WHOLE):
        _put_whole(holder, changed[...])
    else:
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(changed.values())


def is_same(holder: Any, left: dict[Any, Any], right: dict[Any, Any]) -> bool:
    """Tells whether a holder holds the same at two times."""
    if not left and not right:
        return True
    if left.keys() != right.keys():
        return False
    if all(map(is_, left.values(), right.values())) and all(map(is_, left, right)):
        return True  # as nearly always: in the same order too
    if isinstance(holder, WHOLE):
        return is_equal(left[...], right[...])
    return all(left[k] is right[k] for k in left)


def is_unchangeable(holder: Any) -> bool:
    """Tells whether nothing can be put into it; what it holds may still change."""
    return isinstance(holder, _UNCHANGEABLE) or (isinstance(holder, np.ndarray) and not holder.flags.writeable)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def _put_whole(holder: Any, content: Any) -> None:
    if not isinstance(holder, GeneratorState):
        holder[... if isinstance(holder, np.ndarray) else slice(None)] = content
        return
    generator, state = holder.generator, pickle.loads(content)  # our own, from `held_in`
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


_members_of: WeakKeyDictionary[type, dict[str, Any]] = WeakKeyDictionary()


def _members(kind: type) -> dict[str, Any]:
    """Returns what reads the slots of a class and its bases, by name; found past any `__getattribute__`."""
    found = _members_of.get(kind)
    if found is None:
        found = _members_of[kind] = {
            name: member
            for base in reversed(kind.__mro__)
            if "__slots__" in vars(base)
            for name, member in vars(base).items()
            if isinstance(member, MemberDescriptorType)
        }
    return found


def _slotted(value: Any, members: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, member in members.items():
        try:
            found[name] = member.__get__(value)
        except AttributeError:  # nothing was assigned
            continue
    return found


def items_of(value: Any) -> dict[Any, Any]:
    """Returns what a container holds, by index or key; nothing for other objects."""
    if isinstance(value, dict):
        return dict(dict[Any, Any].items(value))
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return dict(enumerate(value.ravel().tolist()))
    if isinstance(value, MappingProxyType):
        return dict(value)
    return {x: x for x in value} if isinstance(value, set | frozenset) else {}


def vars_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object, those in slots too."""
    if isinstance(value, type | ModuleType):
        return {}
    return {**_slotted(value, _members(type(value))), **(getattr(value, "__dict__", None) or {})}


def holders_in(value: Any) -> Sequence[Any]:
    """Lists where `value` holds something that may be replaced: itself, its attributes, its slots.

    Modules, classes and functions are visited on their own, or are the same as long as they are themselves.
    """
    kind = type(value)
    if kind in SIMPLE or (kind is tuple and SIMPLE.issuperset(map(type, value))):
        return _NOTHING
    if kind in BARE:
        return (value,) if len(value) <= LARGEST else _NOTHING
    if isinstance(value, _CLOSED):
        return _NOTHING
    found: list[Any] = []
    if isinstance(value, CONTAINERS):
        if len(value) <= LARGEST:
            found.append(value)
    elif isinstance(value, BUFFERS) and is_copied(value):
        found.append(value)
    elif isinstance(value, GENERATORS):
        found.append(GeneratorState(value))
    own = getattr(value, "__dict__", None)
    if type(own) is dict and len(own) <= LARGEST:
        found.append(own)
    members = _members(kind)
    if members:
        found.append(ObjectSlots(value, members))
    return found


def is_copied(buffer: Any) -> bool:
    """Tells whether what a buffer holds is remembered, rather than only which one it is."""
    size: int = buffer.nbytes if isinstance(buffer, np.ndarray | np.generic) else len(buffer)
    return size <= _LARGEST_BUFFER


def is_plain(value: Any) -> bool:
    """Tells whether `value` is a number, a text, an enum member, or a container of such."""
    if isinstance(value, (*VALUES, Enum)):
        return True
    return isinstance(value, CONTAINERS) and len(value) <= LARGEST and all(map(is_plain, items_of(value).values()))


def leaves_of(value: Any) -> Iterator[Any]:
    """Yields what containers and plain objects in `value` hold at last, not looking into modules or what is called."""
    stack, met = [value], set[int]()
    while stack:
        value = stack.pop()
        if id(value) in met:
            continue
        met.add(id(value))
        is_leaf = isinstance(value, _CLOSED) or callable(value)
        inner = [] if is_leaf else [*items_of(value).values(), *vars_of(value).values()]
        if not inner and value is not MISSING:
            yield value
        stack += inner
