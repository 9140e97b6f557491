"""Makes a record of what values are now."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from megatrain.tracer.python.snapshot import (
    CONTAINERS,
    LARGEST,
    VALUES,
    Array,
    Contents,
    Kept,
    Same,
    TensorLike,
    Value,
    items_of,
    vars_of,
)

_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, staticmethod, classmethod, property)
_LARGEST_ARRAY = 65536
_DEEPEST = 8
# Rarely does a forward depend on more; beyond this the rest is told by identity.
_MOST = 50_000


class Keeper:
    """Makes `Kept` of values; a value that several places hold is kept once.

    Args:
        constants: Identities of the tensors that are constants of the graph.
    """

    def __init__(self, constants: set[int]) -> None:
        self._constants = constants
        self._known: dict[int, tuple[Any, Kept]] = {}

    def keep(self, value: Any, depth: int = 0) -> Kept:
        """Returns what `value` is now."""
        if isinstance(value, VALUES) and not isinstance(value, Enum):
            return Value(value)
        known = self._known.get(id(value))
        if known is None:
            known = (value, self._kept(value, depth))
            self._known[id(value)] = known
        return known[1]

    def _kept(self, value: Any, depth: int) -> Kept:
        if isinstance(value, torch.Tensor):
            return TensorLike.of(value, id(value) in self._constants)
        if isinstance(value, np.ndarray | np.generic) and value.nbytes <= _LARGEST_ARRAY and not value.dtype.hasobject:
            return Array(value.copy())
        if isinstance(value, (*_CODE, nn.Module, Enum)) or depth > _DEEPEST or len(self._known) > _MOST:
            return Same(value)
        is_container = isinstance(value, CONTAINERS)
        if not is_container and not hasattr(value, "__dict__") and not hasattr(type(value), "__slots__"):
            return Same(value)
        items, attributes = items_of(value), vars_of(value)
        if len(items) + len(attributes) > LARGEST:
            return Same(value)
        kind = type(value)
        is_open = kind in CONTAINERS or isinstance(value, tuple | OrderedDict)
        is_ordinary = kind is SimpleNamespace or kind.__new__ is object.__new__
        has_hidden_parts = not (is_open if is_container else is_ordinary)
        kept = Contents(kind, Same(value) if has_hidden_parts else None)
        self._known[id(value)] = (value, kept)  # for objects that hold themselves
        kept.items.update({k: self.keep(v, depth + 1) for k, v in items.items()})
        kept.attributes.update({k: self.keep(v, depth + 1) for k, v in attributes.items()})
        return kept
