"""Names of a call's inputs: the words of the forward's own signature, wherever inputs are printed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx, nn

from megatrain.torch_private import pytree

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Positions:
    """What a signature calls its positional arguments.

    Args:
        names: Of its parameters, in order.
        rest: Of the parameter that takes all further ones (`*args`), if there is one.
    """

    names: tuple[str, ...] = ()
    rest: str | None = None

    def name(self, index: int) -> str:
        """Names a positional argument: `ids`, `args_0` in `*args`, `arg0` where the signature has no name for it."""
        if index < len(self.names):
            return self.names[index]
        return f"arg{index}" if self.rest is None else f"{self.rest}_{index - len(self.names)}"


# Every call of a model asks; `inspect.signature` takes longer than all else that a call does with its arguments.
# By the function, as it is and as a method, whose first argument is bound.
_functions: WeakKeyDictionary[Any, Positions] = WeakKeyDictionary()
_methods: WeakKeyDictionary[Any, Positions] = WeakKeyDictionary()


def positions_of(model: nn.Module) -> Positions:
    """Returns the words for positional arguments of a call of `model`."""
    called = _called(model)
    function = getattr(called, "__func__", called)
    known = _functions if function is called else _methods
    try:
        found = known.get(function)
        if found is None:
            found = known[function] = _positions(called)
        return found
    except TypeError:  # an object that can't be hashed or has no weak references
        return _positions(called)


def _called(model: nn.Module) -> Callable[..., Any]:
    """The code that gets the arguments: `forward`, unless a class of the model's has a `__call__` of its own."""
    for kind in type(model).__mro__:
        if kind is nn.Module:
            break
        if "__call__" in vars(kind):
            return model.__call__
    return model.forward


def _positions(called: Callable[..., Any]) -> Positions:
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return Positions()  # code in C, or a `__signature__` that is none
    names = tuple(p.name for p in parameters if p.kind in _POSITIONAL)
    rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    return Positions(names, rest)


# By the layout of the arguments and the words for them: the calls of a training loop have one layout, or a few.
_made: dict[tuple[str, Positions], tuple[str, ...]] = {}
_MOST = 1024


def input_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], layout: str) -> tuple[str, ...]:
    """Names the leaves of `(args, kwargs)`: `ids`, `labels`, `batch_mask`, `args_0`.

    The names are distinct, and names that a graph accepts unchanged: what is printed of a call, of its graph, and in
    errors has the same words. A name that Python takes for itself gets an underscore: `input_`.

    Args:
        model: What is called.
        args: Positional arguments.
        kwargs: Keyword arguments.
        layout: The tree of both, as text.
    """
    positions = positions_of(model)
    key = layout, positions
    names = _made.get(key)
    if names is None:
        paths = [path for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]]
        if len(_made) >= _MOST:
            _made.clear()
        names = _made[key] = _distinct([_legal(_path_name(path, positions)) for path in paths])
    return names


def _path_name(path: tuple[Any, ...], positions: Positions) -> str:
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path[1:]]
    if path[0].idx == 0 and parts:
        parts[0] = positions.name(path[1].idx)
    return "_".join(parts) or "arg"


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Makes each name another one: the first keeps it, the next is `name_1`."""
    taken: set[str] = set()
    found: list[str] = []
    for name in names:
        chosen, count = name, 0
        while chosen in taken or (count and chosen in names):
            count += 1
            chosen = f"{name}_{count}"
        taken.add(chosen)
        found.append(chosen)
    return tuple(found)


def _legal(name: str) -> str:
    """Returns a name that an fx graph takes as it is."""
    if not name.isidentifier() or not name.isascii():
        name = "".join(c if c.isalnum() and c.isascii() else "_" for c in f"arg_{name}")
    node = fx.Graph().create_node("placeholder", name, name=name)
    return name if node.name == name else f"{name}_"
