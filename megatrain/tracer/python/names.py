"""Finds the globals and closure variables that a model's Python code names, by looking at its code objects.

Nothing is run and nothing is traced: what the code of `forward` names, and the code of the functions and methods
named there, is what it may read. Functions of torch, of the standard library and of packages that the model's own
classes don't come from are not looked into.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import CodeType, FunctionType, MethodType, ModuleType, WrapperDescriptorType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from megatrain.tracer.python.python_values import CONTAINERS, GENERATORS, VALUES, Named, held_in, holders_in, is_plain
from megatrain.tracer.source_line import OURS, file_of, file_of_function, file_of_module, is_library, package_of

# Torch's own bookkeeping in a module: compared as a whole, whether read or not.
REGISTRIES = frozenset(
    """
    _parameters _buffers _modules _non_persistent_buffers_set _backward_pre_hooks _backward_hooks
    _is_full_backward_hook _forward_hooks _forward_hooks_with_kwargs _forward_hooks_always_called
    _forward_pre_hooks _forward_pre_hooks_with_kwargs _state_dict_hooks _state_dict_pre_hooks
    _load_state_dict_pre_hooks _load_state_dict_post_hooks __class__ _call_impl _wrapped_call_impl _compiled_call_impl
    """.split()
)


class Owned(NamedTuple):
    """Values that belong to a hook, by name; those of an object are its attributes, of which the code may name few."""

    path: str
    values: dict[str, Any]
    code: CodeType | None
    is_object: bool = False


def _owned(hook: Any) -> Iterator[Owned]:
    if isinstance(hook, functools.partial):
        name = getattr(hook.func, "__qualname__", "partial")
        code = getattr(hook.func, "__code__", None)
        yield Owned(name, hook.keywords, code)
        yield Owned(name, {f"argument {i}": value for i, value in enumerate(hook.args)}, code)
        yield from _owned(hook.func)
    elif isinstance(hook, FunctionType):
        yield Owned(hook.__qualname__, _defaults(hook), hook.__code__)
        yield Owned(hook.__qualname__, vars(hook), hook.__code__, is_object=True)
    elif isinstance(hook, MethodType):
        yield from _owned(hook.__func__)
        yield from _object(hook.__self__, getattr(hook.__func__, "__code__", None))
    else:
        yield from _object(hook, getattr(vars(type(hook)).get("__call__"), "__code__", None))


def _object(value: Any, code: CodeType | None) -> Iterator[Owned]:
    if hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        yield Owned(type(value).__qualname__, vars(value), code, is_object=True)


def _defaults(function: FunctionType) -> dict[str, Any]:
    code, given = function.__code__, function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount][code.co_argcount - len(given) :]
    return {**dict(zip(positional, given, strict=True)), **(function.__kwdefaults__ or {})}


def _can_change(value: Any) -> bool:
    """Tells whether other code could change what a value holds."""
    return isinstance(value, CONTAINERS) or (
        hasattr(value, "__dict__") and not isinstance(value, type | FunctionType | nn.Module | torch.Tensor)
    )


def _hooks(model: nn.Module, without: Collection[int]) -> list[Any]:
    """Lists the forward hooks of a model except some, by identity."""
    found = (h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()))
    return [hook for hook in found if id(hook) not in without]


@dataclass(frozen=True, slots=True, eq=False)
class Outer:
    """What a model's code reaches besides its modules.

    Args:
        variables: Globals, variables of closures, attributes of classes, arguments bound to hooks.
        objects: Names and attributes of objects whose methods are hooks, or that are hooks themselves.
    """

    variables: Sequence[Named] = ()
    objects: Sequence[tuple[str, dict[str, Any]]] = ()

    @staticmethod
    def of(model: nn.Module, without: Collection[int] = ()) -> Outer:
        """Finds it by looking at code, except that of the forward hooks in `without`, by identity; nothing is run."""
        objects = [found for hook in _hooks(model, without) for found in _owned(hook) if found.is_object]
        named = {id(found.values): (found.path, found.values) for found in objects}
        return Outer(NamedVariables(model, without=without).found, list(named.values()))

    @staticmethod
    def of_hook(hook: Any) -> Outer:
        """Finds what one hook reaches."""
        module = nn.Module()
        module._forward_hooks[0] = hook
        return Outer.of(module)


# What runs without being named.
_ENTRIES = ("forward", "__call__", "__enter__", "__exit__", "__getattr__", "__getitem__")
_MAKERS = ("__init__", "__post_init__", "__new__")
# Tables with more entries than this are registries of a library rather than settings.
_LARGEST_TABLE = 512
_CODE = (FunctionType, MethodType, functools.partial)
_DEEPEST = 3
_OWNED = object()


class NamedVariables:
    """The variables that the code of a model and of its hooks names, in a fixed order.

    Args:
        read: The methods that were looked up, by class of module; None takes every method that is named anywhere.
        without: Identities of forward hooks to leave out.

    Attributes:
        found: What may be a setting or state of the model.
        skipped: What belongs to a library: tables and objects that grow whenever anybody uses it.
    """

    def __init__(
        self, model: nn.Module, read: Mapping[type, set[str]] | None = None, *, without: Collection[int] = ()
    ) -> None:
        self.found: list[Named] = []
        self.skipped: list[Named] = []
        self._met: dict[tuple[int, Any], Any] = {}
        self._names: dict[str, CodeType | None] = dict.fromkeys(_ENTRIES)
        self._classes: dict[str, list[type]] = {}
        self._methods: dict[str, list[Any]] = {}
        self._inherited: dict[str, list[Any]] = {}
        self._stack: list[Any] = []
        kinds = dict.fromkeys(type(module) for module in model.modules())
        self._packages = {package_of(file_of(k)) for kind in kinds for k in kind.__mro__} - {None}
        for kind in kinds:
            self._add_module_class(kind, None if read is None else {"forward", *read.get(kind, ())})
        for module in model.modules():
            for name, value in vars(module).items():
                if name not in REGISTRIES:
                    self._look_into(value)
        self._stack += (hooks := _hooks(model, without))
        self._owned = [found for hook in hooks for found in _owned(hook)]
        self._run()

    def _run(self) -> None:
        """Follows what is known until nothing new is named; each function and class once."""
        while self._stack:
            self._drain()
            for path, values, own_code, is_object in self._owned:
                for name, value in list(values.items()):
                    code = self._names.get(name) if is_object else own_code
                    if code is None or not (is_object or _can_change(value)):
                        continue
                    if self._is_new(values, (_OWNED, name)):
                        self._take(Named(f"{path}.{name}", values, name, code), {})

    def _drain(self) -> None:
        while self._stack:
            value = self._stack.pop()
            is_users = False
            for function in _functions(value):
                if self._is_users(file_of_function(function)):
                    is_users = True
                    if self._is_new(function):
                        self._follow(function)
            if is_users and isinstance(value, _CODE) and self._is_new(value, _OWNED):
                self._owned += _owned(value)

    def _is_new(self, value: Any, part: Any = None) -> bool:
        is_new = (id(value), part) not in self._met
        self._met[id(value), part] = value  # alive, so that its identity stays its own
        return is_new

    def _is_users(self, file: str) -> bool:
        package = package_of(file)
        is_hidden = file.startswith((OURS, "<")) or is_library(file)
        return not is_hidden and (package is None or package in self._packages)

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if self._is_users(file_of(base)) and self._is_new(base):
                self._add_methods(base)
                for name in vars(base) if package_of(file_of(base)) is None and not issubclass(base, Enum) else ():
                    self._classes.setdefault(name, []).append(base)
                    self._take_attribute(base, name, self._names.get(name))

    def _look_into(self, value: Any, depth: int = _DEEPEST) -> None:
        """Finds functions and objects in an attribute, in containers and objects of the user's classes too."""
        if isinstance(value, _CODE):
            self._stack.append(value)
        if isinstance(value, (*VALUES, *_CODE, nn.Module, torch.Tensor)):
            return
        is_users = self._is_users(file_of(type(value)))
        if is_users:
            self._add_class(type(value))
        if depth and (is_users or isinstance(value, CONTAINERS)) and self._is_new(value):
            for holder in holders_in(value):
                for inner in held_in(holder).values():
                    self._look_into(inner, depth - 1)

    def _add_methods(self, kind: type) -> None:
        for name, value in vars(kind).items():
            self._methods.setdefault(name, []).append(value)
            if name in self._names:
                self._stack.append(value)

    def _add_module_class(self, kind: type, read: set[str] | None) -> None:
        for base in kind.__mro__:
            # Of a library's class as well: a program may have put a method of its own there, as torch.fx does.
            self._stack += [value for name, value in vars(base).items() if name in (_ENTRIES if read is None else read)]
            if self._is_users(file_of(base)) and self._is_new(base):
                if read is None:
                    self._add_methods(base)
                for name, value in vars(base).items():
                    self._inherited.setdefault(name, []).append(value)

    def _follow(self, function: FunctionType) -> None:
        codes = codes_of(function.__code__)
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
        if variable.name.startswith("__") and variable.name.endswith("__"):
            return
        if isinstance(value, ModuleType):
            if self._is_users(getattr(value, "__file__", None) or file_of_module(value.__name__)):
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
            return any(self._is_users(file_of_function(f)) for f in _functions(value))
        is_installed = variable.code is not None and package_of(variable.code.co_filename) is not None
        is_setting = self._is_setting(value, is_installed=is_installed)
        if not is_setting and not callable(value) and self._is_new(variable.holder, variable.name):
            self.skipped.append(variable)
        return is_setting

    def _take_class(self, kind: type) -> bool:
        if not self._is_users(file_of(kind)):
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
        if is_plain(value) or isinstance(value, GENERATORS):
            return True
        self._add_class(type(value))
        # Tables and objects of a library grow whenever anybody uses it, which says nothing about this model.
        is_open = isinstance(value, (*CONTAINERS, torch.Tensor, np.ndarray))
        return not is_installed and (is_open or self._is_users(file_of(type(value))))


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


def codes_of(code: CodeType) -> list[CodeType]:
    """Returns a function's code and that of the functions defined inside it."""
    return [code, *(inner for c in code.co_consts if isinstance(c, CodeType) for inner in codes_of(c))]
