"""Runs a model's forward on fake state and leaves no trace of it in the model."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

_MUTABLE = (dict, OrderedDict, list, set)
_SCALARS = (bool, int, float, str, type(None))


def fake_state(
    tensors: dict[str, torch.Tensor], fake_mode: FakeTensorMode, device: torch.device
) -> dict[str, torch.Tensor]:
    """Makes a fake tensor on `device` for each state tensor, with the same layout and `requires_grad`."""
    fakes: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        with fake_mode, torch.no_grad():
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            fake.__dict__.update({k: v for k, v in tensor.__dict__.items() if k not in fake.__dict__})
        elif tensor.requires_grad and tensor.is_leaf:
            fake.requires_grad_()
        fakes[key] = fake
    return fakes


@contextmanager
def swapped_state(module: nn.Module, replacement: dict[int, torch.Tensor]) -> Iterator[None]:
    """Puts `replacement[id(tensor)]` where `module` holds a tensor, and undoes all changes to modules at the end."""
    saved = [_Saved(child) for child in module.modules()]
    try:
        for child in module.modules():
            for holder in (child._parameters, child._buffers):
                for name, tensor in holder.items():
                    if tensor is not None and id(tensor) in replacement:
                        holder[name] = replacement[id(tensor)]
        yield
    finally:
        for item in saved:
            item.restore()


class _Saved:
    """The attributes of one module, and the contents of its plain containers, as they were."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = dict(module.__dict__)
        self._contents = {k: v.copy() for k, v in self._attributes.items() if type(v) in _MUTABLE}

    def restore(self) -> None:
        for name, content in self._contents.items():
            holder: Any = self._attributes[name]
            if isinstance(holder, list):
                holder[:] = content
            else:
                holder.clear()
                holder.update(content)
        self._module.__dict__.clear()
        self._module.__dict__.update(self._attributes)


def scalar_attributes(module: nn.Module) -> dict[str, Any]:
    """Returns the plain Python values that modules hold as attributes, by fully qualified name."""
    found: dict[str, Any] = {}
    for prefix, child in module.named_modules():
        for name, value in child.__dict__.items():
            if isinstance(value, _SCALARS):
                found[f"{prefix}.{name}" if prefix else name] = value
    return found


@contextmanager
def kept_rng() -> Iterator[list[str]]:
    """Restores every random generator at the end; the list yielded then names the host generators that moved."""
    python, host, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    has_device = torch.accelerator.is_available()
    device = torch.get_device_module().get_rng_state() if has_device else None
    moved: list[str] = []
    try:
        yield moved
    finally:
        if random.getstate() != python:
            moved.append("random")
        if not _same_numpy_state(np.random.get_state(), host):
            moved.append("numpy.random")
        random.setstate(python)
        np.random.set_state(host)
        torch.set_rng_state(cpu)
        if device is not None:
            torch.get_device_module().set_rng_state(device)


def _same_numpy_state(left: Any, right: Any) -> bool:
    return left[2:] == right[2:] and bool((left[1] == right[1]).all())
