"""The signature that selects a capture: arguments, modes, and which parameters are trained and tied."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from megatrain.device import Device
from megatrain.tracer.changes import Watch
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.structure import Arguments
from megatrain.tracer.tree import GLOBAL_HOOKS, HOOKS

_facts = attrgetter("requires_grad", "shape", "dtype")


def call_signature(arguments: Arguments, device: Device) -> Hashable:
    """Returns the properties of a call that a capture assumes: structure, specs, literals, modes, torch's defaults."""
    has_grad = torch.is_grad_enabled()
    specs = tuple((TensorSpec.of(t), t.requires_grad and has_grad) for t in arguments.tensors)
    literals = tuple(_literal_key(x) for x in arguments.literals)
    autocast = tuple((d, torch.get_autocast_dtype(d)) for d in device.autocast_kinds if torch.is_autocast_enabled(d))
    defaults = torch.get_default_dtype(), torch.get_default_device()
    return arguments.layout, specs, literals, has_grad, autocast, defaults


def _literal_key(value: Any) -> Hashable:
    """A key for a non-tensor argument: equal keys mean that a forward can't tell the values apart."""
    kind = type(value).__qualname__
    if isinstance(value, float | complex | slice):
        return kind, repr(value)  # 0.0 == -0.0, NaN != NaN, and slices have no hash before Python 3.12
    try:
        hash(value)
    except TypeError:
        return kind, id(value)
    return kind, value


class ModelWatch:
    """Notices at little cost when the modules of a model, their registries, hooks or modes have changed.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.version = 0
        self.shapes_version = 0
        self._specs: Hashable = None
        self._signature: Hashable = None
        self._renew()

    def signature(self) -> Hashable:
        """Returns the modes of the modules, the state's shapes, which parameters are trained, and which are tied.

        Afterwards `version` has changed if anything in the modules' registries, hooks or names changed, and
        `shapes_version` has changed if the state has other shapes or dtypes.
        """
        if not self._has_same_modules():
            self._renew()
        elif not self._has_same_modes():
            self._read()
        return self._signature

    def _renew(self) -> None:
        self.version += 1
        modules = list(self._model.modules())
        self._own = [vars(module) for module in modules]
        self._lengths = list(map(len, self._own))
        # A new name stands last.
        self._latest = list(map(next, map(reversed, self._own)))
        registries = [own[name] for own in self._own for name in ("_parameters", "_buffers", "_modules")]
        self._registries = [held for held in registries if held]
        self._registered = list(chain.from_iterable(map(dict.values, self._registries)))
        self._sizes = list(map(len, self._registries))
        # Those of lazy modules have no shape yet; a capture refuses them.
        self._tensors = [x for x in self._registered if isinstance(x, torch.Tensor) and not is_lazy(x)]
        hooks = [*(own[name] for own in self._own for name in HOOKS), *GLOBAL_HOOKS]
        self._empty = [held for held in (*registries, *hooks) if not held]
        self._hooks = Watch()
        for held in hooks:
            if held:
                self._hooks.add_table(held)
        for own in self._own:
            for name in HOOKS:
                if own[name]:
                    self._hooks.add_name(own, name)
        self._read()

    def _has_same_modules(self) -> bool:
        return (
            list(map(len, self._own)) == self._lengths
            and list(map(next, map(reversed, self._own))) == self._latest
            and list(map(len, self._registries)) == self._sizes
            and all(map(is_, chain.from_iterable(map(dict.values, self._registries)), self._registered))
            and not any(self._empty)
            and self._hooks.is_unchanged()
        )

    def _has_same_modes(self) -> bool:
        modes = [own.get("training") for own in self._own]
        return modes == self._modes and list(map(_facts, self._tensors)) == self._known

    def _read(self) -> None:
        self._modes = [own.get("training") for own in self._own]
        self._known = list(map(_facts, self._tensors))
        first_seen: dict[int, int] = {}
        state: list[tuple[int, bool] | None] = []
        specs: dict[int, Hashable] = {}
        for tensor in self._registered:
            if tensor is None:
                state.append(None)
            elif isinstance(tensor, torch.Tensor):
                state.append((first_seen.setdefault(id(tensor), len(state)), tensor.requires_grad))
                specs[len(state)] = None if is_lazy(tensor) else (tuple(tensor.shape), tensor.dtype)
        self._signature = tuple(self._modes), tuple(state), tuple(specs.items())
        if self._specs != tuple(specs.values()):
            self._specs = tuple(specs.values())
            self.shapes_version += 1
