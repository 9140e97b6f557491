"""Finds the globals and closure variables that a model's Python code names, by looking at its code objects.

Nothing is run and nothing is traced: what the code of `forward` names, and the code of the functions and methods
named there, is what it may read. Functions of torch, of the standard library and of packages that the model's own
classes don't come from are not looked into.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, WrapperDescriptorType
from typing import Any

import numpy as np
import torch
from torch import nn

from megatrain.tracer.python.owned import Owned, can_change, owned
from megatrain.tracer.python.snapshot import CONTAINERS, MISSING, is_plain
from megatrain.tracer.source_line import OURS, TORCH, SourceLine

_PACKAGES = sysconfig.get_path("purelib") + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
# What runs without being named.
_ENTRIES = ("forward", "__call__", "__enter__", "__exit__", "__getattr__", "__getitem__")
_MAKERS = ("__init__", "__post_init__", "__new__")
# Tables with more entries than this are registries of a library rather than settings.
_LARGEST_TABLE = 512
_CODE = (FunctionType, MethodType, functools.partial)


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """A variable that isn't an attribute of a module, as code names it.

    Args:
        path: Its name: `SCALE`, `settings.SCALE`, `Settings.SCALE`.
        holder: The namespace it lives in, or a closure's cell.
        name: Its name there.
        code: The code that names it.
    """

    path: str
    holder: dict[str, Any] | type | CellType
    name: str
    code: CodeType

    @property
    def key(self) -> tuple[int, str]:
        """Tells variables apart while their namespaces are alive."""
        return id(self.holder), self.name

    def now(self) -> Any:
        """Returns what it holds now."""
        if not isinstance(self.holder, CellType):
            return _parts(self.holder).get(self.name, MISSING)
        try:
            return self.holder.cell_contents
        except ValueError:  # nothing was assigned yet
            return MISSING

    def put(self, value: Any) -> None:
        """Puts a value in its place; `MISSING` takes it away."""
        if isinstance(self.holder, CellType):
            if value is not MISSING:
                self.holder.cell_contents = value
            elif self.now() is not MISSING:
                del self.holder.cell_contents
        elif isinstance(self.holder, type):
            delattr(self.holder, self.name) if value is MISSING else setattr(self.holder, self.name, value)
        elif value is MISSING:
            self.holder.pop(self.name, None)
        else:
            self.holder[self.name] = value

    @property
    def source(self) -> SourceLine:
        """The first line that names it."""
        return SourceLine(self.code.co_filename, _line_of(self.code, self.name), self.code.co_qualname)


def named_variables(
    model: nn.Module, read: Mapping[type, set[str]] | None = None, *, without: Collection[int] = ()
) -> list[Named]:
    """Lists the variables that the code of `model` and of its hooks names, in a fixed order.

    Args:
        model: The model.
        read: The methods that were looked up, by class of module; None takes every method that is named anywhere.
        without: Identities of forward hooks to leave out.
    """
    search = _Search(model, read, without)
    search.run()
    return search.found


class _Search:
    """A walk over functions and classes, each once."""

    def __init__(self, model: nn.Module, read: Mapping[type, set[str]] | None, without: Collection[int]) -> None:
        self.found: list[Named] = []
        self._met: dict[tuple[int, Any], Any] = {}
        self._names: dict[str, CodeType | None] = dict.fromkeys(_ENTRIES)
        self._classes: dict[str, list[type]] = {}
        self._methods: dict[str, list[Any]] = {}
        self._inherited: dict[str, list[Any]] = {}
        self._stack: list[Any] = []
        self._owned: list[Owned] = []
        kinds = dict.fromkeys(type(module) for module in model.modules())
        self._packages = {_package(_file_of(k)) for kind in kinds for k in kind.__mro__} - {None}
        for kind in kinds:
            self._add_module_class(kind, None if read is None else {"forward", *read.get(kind, ())})
        for module in model.modules():
            for value in vars(module).values():
                if isinstance(value, _CODE):
                    self._stack.append(value)
                elif not isinstance(value, nn.Module | torch.Tensor):
                    self._add_classes_in(value)
            hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
            hooks = [hook for hook in hooks if id(hook) not in without]
            self._stack += hooks
            self._owned += [found for hook in hooks for found in owned(hook)]

    def run(self) -> None:
        """Follows what is known until nothing new is named."""
        self._drain()
        for path, values, own_code, is_object in self._owned:
            for name, value in list(values.items()):
                code = self._names.get(name) if is_object else own_code
                if code is not None and (is_object or can_change(value)):
                    self._take(Named(f"{path}.{name}", values, name, code), {})
        self._drain()

    def _drain(self) -> None:
        while self._stack:
            for function in _functions(self._stack.pop()):
                if self._is_users(function.__code__.co_filename) and self._is_new(function):
                    self._follow(function)

    def _is_new(self, value: Any, part: Any = None) -> bool:
        is_new = (id(value), part) not in self._met
        self._met[id(value), part] = value  # alive, so that its identity stays its own
        return is_new

    def _is_users(self, file: str) -> bool:
        if file.startswith(_PACKAGES):
            return not file.startswith((TORCH, OURS)) and _package(file) in self._packages
        return not file.startswith((OURS, TORCH, _STANDARD)) and file[:1] != "<"

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if self._is_users(_file_of(base)) and self._is_new(base):
                self._add_methods(base)
                for name in vars(base) if _package(_file_of(base)) is None and not issubclass(base, Enum) else ():
                    self._classes.setdefault(name, []).append(base)
                    self._take_attribute(base, name, self._names.get(name))

    def _add_classes_in(self, value: Any, depth: int = 3) -> None:
        kind = type(value)
        if self._is_users(_file_of(kind)):
            self._add_class(kind)
            for inner in vars(value).values() if depth and hasattr(value, "__dict__") and self._is_new(value) else ():
                self._add_classes_in(inner, depth - 1)

    def _add_methods(self, kind: type) -> None:
        for name, value in vars(kind).items():
            self._methods.setdefault(name, []).append(value)
            if name in self._names:
                self._stack.append(value)

    def _add_module_class(self, kind: type, read: set[str] | None) -> None:
        for base in kind.__mro__:
            if not self._is_users(_file_of(base)):
                continue
            if read is not None:
                self._stack += [value for name, value in vars(base).items() if name in read]
            if self._is_new(base):
                if read is None:
                    self._add_methods(base)
                for name, value in vars(base).items():
                    self._inherited.setdefault(name, []).append(value)

    def _follow(self, function: FunctionType) -> None:
        codes = _codes(function.__code__)
        named = dict.fromkeys(name for code in codes for name in code.co_names)
        if "super" in named:  # whose lookups go past the recorder of attribute reads
            self._stack += [method for name in named for method in self._inherited.get(name, ())]
        for code in codes:
            for name in code.co_names:
                if name not in self._names:
                    self._names[name] = code
                    self._stack += self._methods.get(name, ())
                    for kind in self._classes.get(name, ()):
                        self._take_attribute(kind, name, code)
                if name in function.__globals__:
                    self._take(Named(name, function.__globals__, name, code), named)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._take(Named(name, cell, name, function.__code__), named)

    def _take(self, variable: Named, named: dict[str, None]) -> None:
        value = variable.now()
        if variable.name.startswith("__"):
            return
        if isinstance(value, ModuleType):
            if self._is_users(getattr(value, "__file__", None) or "<"):
                self._take_parts(variable, vars(value), named)
        elif self._is_worth_noting(variable, value) and self._is_new(variable.holder, variable.name):
            self.found.append(variable)

    def _is_worth_noting(self, variable: Named, value: Any) -> bool:
        if isinstance(value, nn.Module):
            return True  # which one it is; what is read from it is noted like any other module's
        if isinstance(value, type):
            return self._take_class(value)
        if isinstance(value, _CODE):
            self._stack.append(value)
            return any(self._is_users(f.__code__.co_filename) for f in _functions(value))
        return self._is_setting(value, is_installed=_package(variable.code.co_filename) is not None)

    def _take_class(self, kind: type) -> bool:
        if not self._is_users(_file_of(kind)):
            return False
        self._stack += [vars(kind)[name] for name in _MAKERS if name in vars(kind)]
        if not issubclass(kind, nn.Module):
            self._add_class(kind)
        return True

    def _take_attribute(self, kind: type, name: str, code: CodeType | None) -> None:
        if code is not None:
            self._take(Named(f"{kind.__qualname__}.{name}", kind, name, code), {})

    def _take_parts(self, owner: Named, holder: dict[str, Any], named: dict[str, None]) -> None:
        for name in named:
            if name in holder and self._is_new(holder, (name, owner.code)):
                self._take(Named(f"{owner.path}.{name}", holder, name, owner.code), named)

    def _is_setting(self, value: Any, *, is_installed: bool) -> bool:
        if is_installed and isinstance(value, list | tuple | dict | set | frozenset) and len(value) > _LARGEST_TABLE:
            return False
        if is_plain(value):
            return True
        self._add_class(type(value))
        # Tables and objects of a library grow whenever anybody uses it, which says nothing about this model.
        is_open = isinstance(value, (*CONTAINERS, torch.Tensor, np.ndarray))
        return not is_installed and (is_open or self._is_users(_file_of(type(value))))


def _parts(holder: dict[str, Any] | type) -> Mapping[str, Any]:
    return vars(holder) if isinstance(holder, type) else holder


def _file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ("<" if kind.__module__ != "__main__" else "")


def _package(file: str) -> str | None:
    """Returns the top folder of an installed package's file."""
    return file[len(_PACKAGES) :].partition(os.sep)[0] if file.startswith(_PACKAGES) else None


def _functions(value: Any) -> Iterator[FunctionType]:
    """Yields the Python functions that calling or reading `value` may run."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, FunctionType):
            yield value
        elif isinstance(value, staticmethod | classmethod | MethodType):
            stack.append(value.__func__)
        elif isinstance(value, property):
            stack += [f for f in (value.fget, value.fset) if f is not None]
        elif isinstance(value, functools.partial | functools.cached_property):
            stack.append(value.func)
        elif not isinstance(value, type | WrapperDescriptorType):  # the last is what C code is called by, itself too
            stack += [k.__dict__["__call__"] for k in type(value).__mro__[:-1] if "__call__" in k.__dict__]


def _codes(code: CodeType) -> list[CodeType]:
    """Returns a function's code and that of the functions defined inside it."""
    return [code, *(inner for c in code.co_consts if isinstance(c, CodeType) for inner in _codes(c))]


@functools.lru_cache(maxsize=4096)
def _line_of(code: CodeType, name: str) -> int:
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = (instruction.starts_line or line) if sys.version_info < (3, 13) else (instruction.line_number or line)
        if instruction.argval == name:
            return line
    return code.co_firstlineno
