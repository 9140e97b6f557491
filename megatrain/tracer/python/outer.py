"""Python state outside the modules that a model's code and its hooks can reach: variables, and objects of hooks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import nn

from megatrain.tracer.python.contents import CONTAINERS
from megatrain.tracer.python.globals import named_variables
from megatrain.tracer.python.named import Named
from megatrain.tracer.python.owned import owned
from megatrain.tracer.source_line import file_of, is_library


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
