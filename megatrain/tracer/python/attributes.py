"""Records which attributes of modules the running forward reads."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from megatrain.patches import original_of, replaced_here
from megatrain.tracer.python.contents import MISSING, VALUES
from megatrain.tracer.source_line import OURS, SourceLine, user_line

# Torch's own bookkeeping: compared as a whole, whether read or not.
REGISTRIES = frozenset(
    """
    _parameters _buffers _modules _non_persistent_buffers_set _backward_pre_hooks _backward_hooks
    _is_full_backward_hook _forward_hooks _forward_hooks_with_kwargs _forward_hooks_always_called
    _forward_pre_hooks _forward_pre_hooks_with_kwargs _state_dict_hooks _state_dict_pre_hooks
    _load_state_dict_pre_hooks _load_state_dict_post_hooks __class__ _call_impl _wrapped_call_impl _compiled_call_impl
    """.split()
)
_TORCH_MODULE_FILE = sys.modules["torch.nn.modules.module"].__file__


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """The first read of an attribute.

    Args:
        value: What the module's own `__dict__` held, or `MISSING`: then its class or a registry gave the answer.
        source: The user's line.
    """

    value: Any
    source: SourceLine | None


class Reads:
    """The attributes that one thread's forward read, by module."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.by_module: dict[int, dict[str, Read | None]] = {}
        self.made: dict[int, nn.Module] = {}  # by the forward itself, such as a loss of its own at each call

    def note(self, module: nn.Module, name: str) -> None:
        """Keeps the first read of `name`."""
        attributes: dict[str, Any] = object.__getattribute__(module, "__dict__")
        if id(module) not in self.by_module:
            self.modules[id(module)] = module  # alive, so that its identity stays its own
            self.by_module[id(module)] = {}
        is_bookkeeping = name in REGISTRIES
        read = None if is_bookkeeping else Read(attributes.get(name, MISSING), user_line())
        self.by_module[id(module)][name] = read

    def items(self) -> Iterator[tuple[nn.Module, dict[str, Read]]]:
        """Yields each module with what was read from it, in the order of the first reads."""
        for identity, names in self.by_module.items():
            yield self.modules[identity], {n: r for n, r in names.items() if r is not None}

    def note_all(self, module: nn.Module) -> None:
        """Notes a read of everything that `module` holds itself, wherever that was."""
        self.modules[id(module)] = module
        names = self.by_module.setdefault(id(module), {})
        for name, value in vars(module).items():
            if name not in REGISTRIES:
                names.setdefault(name, Read(value, None))


def _lookup_of(kind: type) -> type:
    """Returns the class that defines how attributes of `kind` are read, other than by the hook below."""
    return next(k for k in kind.__mro__ if k is not nn.Module and "__getattribute__" in k.__dict__)


@contextmanager
def recorded_reads(root: nn.Module, instead: Mapping[tuple[int, str], Any]) -> Generator[Reads]:
    """Notes what this thread reads from modules, through a hook in `nn.Module` that is there for the body only.

    Classes with an attribute lookup of their own are taken to read everything.

    Args:
        root: The model.
        instead: What the thread finds in place of attributes, by module's identity and name; such reads aren't noted.
    """
    reads, initialize = Reads(), original_of(nn.Module, "__init__")
    for module in root.modules():
        if _lookup_of(type(module)) is not object:
            reads.note_all(module)

    def look_up(module: Any, name: str) -> Any:
        if name == "__dict__":
            # Torch looks into it for every parameter; anybody else may see all that is in it.
            file = sys._getframe(2).f_code.co_filename  # pyright: ignore[reportPrivateUsage]
            if file != _TORCH_MODULE_FILE and not file.startswith(OURS):
                reads.note_all(module)
        elif instead and (id(module), name) in instead:
            return instead[id(module), name]
        else:
            names = reads.by_module.get(id(module))
            if names is None or name not in names:
                reads.note(module, name)
        return object.__getattribute__(module, name)

    def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        reads.made[id(module)] = module
        initialize(module, *args, **kwargs)

    with replaced_here(nn.Module, "__getattribute__", look_up), replaced_here(nn.Module, "__init__", init):
        yield reads


# Hooks that change what a forward does, by the attribute that holds them.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOK_OPTIONS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(
    getattr(torch_module, f"_global{name}") for name in (*HOOKS, *_HOOK_OPTIONS[1:])
)


@dataclass(frozen=True, slots=True, eq=False)
class ModuleNode:
    """One module of a tree.

    Args:
        path: Its name, from `model`.
        module: The module, which isn't kept alive.
        kind: Its class.
        registered: Names of its parameters and buffers.
        children: Its direct children by name.
        hooks: Its hooks, with their options.
    """

    path: str
    module: weakref.ref[nn.Module]
    kind: type
    registered: tuple[tuple[str, ...], tuple[str, ...]]
    children: tuple[tuple[str, Any], ...]
    hooks: tuple[tuple[Any, ...], ...]

    @staticmethod
    def of(path: str, module: nn.Module) -> ModuleNode:
        """Reads what `module` has now."""
        children = tuple((n, None if c is None else weakref.ref(c)) for n, c in _children(module))
        return ModuleNode(path, weakref.ref(module), type(module), _registered(module), children, _hooks(module))

    def failure(self) -> str | None:
        """Returns what is different now, or None."""
        module = self.module()
        if module is None:
            return f"{self.path} is another module now"
        if type(module) is not self.kind:
            return f"{self.path} is of class {type(module).__qualname__} now, not {self.kind.__qualname__}"
        now = list(_children(module))
        for (name, child), (name_now, child_now) in zip(self.children, now, strict=False):
            if name != name_now or (child_now is not None if child is None else child() is not child_now):
                return f"{self.path}.{name} is another module now"
        if len(now) != len(self.children):
            return f"{self.path} has {len(now)} children, not {len(self.children)}"
        if _registered(module) != self.registered:
            return f"{self.path} registers other parameters or buffers now"
        return f"{self.path} has other hooks now" if not _are_same(_hooks(module), self.hooks) else None


@dataclass(frozen=True, slots=True, eq=False)
class ModuleTree:
    """All modules of a model, and the hooks that torch runs for every module.

    Args:
        nodes: The modules, parents first.
        global_hooks: The hooks for every module, with their options.
    """

    nodes: tuple[ModuleNode, ...]
    global_hooks: tuple[tuple[Any, ...], ...]

    @staticmethod
    def of(model: nn.Module) -> ModuleTree:
        """Reads the modules of `model` as they are now."""
        nodes = (ModuleNode.of(_joined(name), module) for name, module in model.named_modules())
        return ModuleTree(tuple(nodes), _global_hooks())

    def failure(self) -> str | None:
        """Returns what is different now, or None."""
        if not _are_same(_global_hooks(), self.global_hooks):
            return "torch runs other hooks for every module now"
        return next((f for f in map(ModuleNode.failure, self.nodes) if f is not None), None)

    def paths(self) -> dict[int, str]:
        """Returns the first path of each module, by identity."""
        return {id(node.module()): node.path for node in self.nodes}


def _joined(name: str) -> str:
    return f"model.{name}" if name else "model"


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module | None]]:
    return iter(module._modules.items())


def _registered(module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(module._parameters), tuple(module._buffers)


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


class NotFrozenError(Exception):
    """The function holds an object whose later changes no copy can be kept from."""


def frozen(value: Any) -> Any:
    """Returns a copy of a function, and of the functions and containers that it holds.

    Raises:
        NotFrozenError: If it holds anything but functions, containers, tensors and values that never change.
    """
    return _frozen(value, {})


def _frozen(value: Any, met: dict[int, Any]) -> Any:
    if id(value) in met:
        return met[id(value)]
    if isinstance(value, FunctionType):
        return _frozen_function(value, met)
    if isinstance(value, functools.partial):
        args = [_frozen(x, met) for x in value.args]
        return functools.partial(_frozen(value.func, met), *args, **_frozen(value.keywords, met))
    if type(value) in (tuple, list, set, frozenset):
        return type(value)(_frozen(x, met) for x in value)
    if type(value) is dict:
        return {key: _frozen(x, met) for key, x in value.items()}
    if isinstance(value, (*VALUES, torch.Tensor, torch.Size, Enum, type, BuiltinFunctionType, ModuleType)):
        return value
    raise NotFrozenError(type(value).__qualname__)


def _frozen_function(function: FunctionType, met: dict[int, Any]) -> FunctionType:
    cells = tuple(CellType() for _ in function.__closure__ or ())
    copied = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells or None)
    met[id(function)] = copied  # before its cells: a function may close over itself
    for cell, original in zip(cells, function.__closure__ or (), strict=True):
        try:
            held = original.cell_contents
        except ValueError:
            raise NotFrozenError("a variable without a value") from None
        cell.cell_contents = _frozen(held, met)
    copied.__defaults__ = _frozen(function.__defaults__, met)
    copied.__kwdefaults__ = _frozen(function.__kwdefaults__, met)
    return copied
