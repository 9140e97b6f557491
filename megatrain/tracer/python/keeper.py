"""Makes snapshots of what values are now."""

from __future__ import annotations

import copy
from collections import OrderedDict
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from megatrain.tracer.python.contents import BUFFERS, CONTAINERS, LARGEST, VALUES, is_copied, items_of, vars_of
from megatrain.tracer.python.snapshot import Contents, Kept, KeptValue, Same, TensorLike

_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, staticmethod, classmethod, property)
# How many objects may lie in each other, and how many containers count as one.
_DEEPEST, _CONTAINER_DEPTH = 8, 0.125
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

    def keep(self, value: Any, depth: float = 0) -> Kept:
        """Returns what `value` is now."""
        if isinstance(value, VALUES) and not isinstance(value, Enum):
            return KeptValue(value)
        known = self._known.get(id(value))
        if known is None:
            known = (value, self._kept(value, depth))
            self._known[id(value)] = known
        return known[1]

    def _kept(self, value: Any, depth: float) -> Kept:
        if isinstance(value, torch.Tensor):
            return TensorLike.of(value, id(value) in self._constants)
        is_buffer = isinstance(value, (*BUFFERS, np.generic)) and is_copied(value)
        if is_buffer and not (isinstance(value, np.ndarray) and value.dtype.hasobject):
            return KeptValue(copy.copy(value))
        is_code = isinstance(value, (*_CODE, nn.Module, Enum))
        if is_code or depth > _DEEPEST or len(self._known) > _MOST:
            return Same(value, is_cut=not is_code)
        return self._contents(value, depth, is_container=is_buffer or isinstance(value, CONTAINERS))

    def _contents(self, value: Any, depth: float, *, is_container: bool) -> Kept:
        if not is_container and not hasattr(value, "__dict__") and not hasattr(type(value), "__slots__"):
            # Of what is written in C, functions and what has a hash of its own don't change.
            return Same(value, is_cut=not callable(value) and type(value).__hash__ in (None, object.__hash__))
        items, attributes = items_of(value), vars_of(value)
        if len(items) + len(attributes) > LARGEST:
            return Same(value, is_cut=True)
        kind = type(value)
        is_open = kind in CONTAINERS or isinstance(value, tuple | OrderedDict)
        is_ordinary = kind is SimpleNamespace or kind.__new__ is object.__new__
        has_hidden_parts = not (is_open if is_container else is_ordinary)
        kept = Contents(kind, Same(value) if has_hidden_parts else None)
        self._known[id(value)] = (value, kept)  # for objects that hold themselves
        depth += _CONTAINER_DEPTH if is_container else 1
        kept.items.update({k: self.keep(v, depth) for k, v in items.items()})
        kept.attributes.update({k: self.keep(v, depth) for k, v in attributes.items()})
        return kept
