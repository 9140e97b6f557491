"""Objects of classes derived from `collections.UserDict` (a tokenizer's batch) as arguments: containers, like a dict.

`opened` puts nodes into the place of such objects, which torch's pytree takes apart. Flattened and put together again,
a node gives a new object of its class. Values of the dictionary are leaves, as those of a dict. Other attributes that
never change are part of the layout. Those that may change (a tokenizer's own encodings) aren't compared between calls,
so the new object has `_Unread` in their place.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

import torch

from megatrain.base.torch_private import pytree
from megatrain.errors import TraceError

IMMUTABLE = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type(...), torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch.Size, frozenset, type,
)  # fmt: skip
"""Values of these types never change, and equal ones make equal captures."""


def opened(value: Any) -> Any:
    """Returns nested arguments with a node that pytree knows in place of each object of a class of `UserDict`."""
    if not any(isinstance(leaf, UserDict) for leaf in pytree.tree_leaves(value)):
        return value
    return pytree.tree_map_only(UserDict, Opened.of, value)


def in_bf16(value: Any) -> Any:
    """Returns nested arguments with fp32 tensors as bf16; objects of a `UserDict` class keep all their attributes."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, UserDict):
            return _made(type(leaf), vars(leaf) | {"data": in_bf16(leaf.data)})  # pyright: ignore
        return leaf.to(torch.bfloat16) if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 else leaf

    return pytree.tree_map(changed, value)


def contents(value: Any) -> Any:
    """Returns nested arguments with all that objects of classes of `UserDict` hold in their place."""

    def looked_into(leaf: Any) -> Any:
        if not isinstance(leaf, UserDict):
            return leaf
        return contents({name: dict(held) if name == "data" else held for name, held in vars(leaf).items()})  # pyright: ignore

    return pytree.tree_map(looked_into, value)


def attributes(value: Mapping[Any, Any]) -> dict[str, Any]:
    """What a mapping has besides the values of its dictionary."""
    own = vars(value) if isinstance(value, UserDict) else {}
    return {name: held for name, held in own.items() if name != "data"}


@dataclass(frozen=True, slots=True)
class _Shape:
    """What two objects must have in common for one capture to stand for both."""

    kind: type
    keys: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]
    unread: tuple[str, ...]


class Opened:
    """A node of a pytree."""

    def __init__(self, shape: _Shape, values: list[Any]) -> None:
        self.shape = shape
        self.values = values

    @staticmethod
    def of(given: UserDict[Any, Any]) -> Opened:
        """Takes an object apart."""
        others = attributes(given)
        constants = tuple((name, held) for name, held in others.items() if isinstance(held, (Enum, *IMMUTABLE)))
        known = {name for name, _ in constants}
        unread = tuple(name for name in others if name not in known)
        data = opened(dict(given.data))
        return Opened(_Shape(type(given), tuple(data), constants, unread), list(data.values()))


class _Unread:
    """In place of an attribute that isn't compared between calls: whatever reads it is refused."""

    def __init__(self, name: str) -> None:
        vars(self)["name"] = name

    def __deepcopy__(self, memo: Any) -> _Unread:
        return self

    def __copy__(self) -> _Unread:
        return self

    def __reduce__(self) -> Any:
        return _Unread, (vars(self)["name"],)

    def _refuse(self, *args: Any) -> NoReturn:
        raise TraceError(
            f"the model reads `{vars(self)['name']}` of its argument, which may change between calls.\n"
            "  A capture stands for calls with equal arguments: plain values and the dictionary's own compare.\n"
            "  Pass what the model needs as a tensor or a plain value of the dictionary."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself asks for, and is told by a lack
            raise AttributeError(name)
        self._refuse()

    __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __call__ = __str__ = _refuse


def _made(kind: type, held: Mapping[str, Any]) -> Any:
    made: Any = object.__new__(kind)
    vars(made).update(held)
    return made


def _flatten(node: Opened) -> tuple[list[Any], _Shape]:
    return node.values, node.shape


def _flatten_with_keys(node: Opened) -> tuple[list[tuple[Any, Any]], _Shape]:
    keys = map(pytree.MappingKey, node.shape.keys)
    return list(zip(keys, node.values, strict=True)), node.shape


def _unflatten(values: Any, shape: _Shape) -> Any:
    hidden = {name: _Unread(f"{shape.kind.__qualname__}.{name}") for name in shape.unread}
    return _made(shape.kind, {"data": dict(zip(shape.keys, values, strict=True)), **dict(shape.constants), **hidden})


pytree.register_pytree_node(Opened, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)
