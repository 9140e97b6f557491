"""The modules of a model as a capture found them: which there are, what they register, which hooks they run."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

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
