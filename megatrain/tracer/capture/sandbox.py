"""Runs a model's forward on fake state and leaves no trace of it in the model."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatrain.patches import replaced_elsewhere
from megatrain.torch_private import FakeTensorMode
from megatrain.tracer.python.holders import Attributes
from megatrain.tracer.python.outer import Outer
from megatrain.tracer.recording.own_code import original

_REGISTRIES = ("_parameters", "_buffers")
_SHOWN = ("__dict__", *_REGISTRIES)


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
            attributes: dict[str, Any] = vars(fake)
            attributes |= {k: v for k, v in vars(tensor).items() if k not in attributes}
        elif tensor.requires_grad and tensor.is_leaf:
            fake.requires_grad_()
        fakes[key] = fake
    return fakes


@contextmanager
def swapped_state(
    module: nn.Module, replacement: dict[int, torch.Tensor], outer: Outer | None = None
) -> Generator[Attributes]:
    """Lets this thread find `replacement[id(tensor)]` where `module` holds a tensor.

    Modules get registries of their own for the body, so that the model's own ones are never touched: other threads go
    on finding those. At the end all changes are undone. Yields what the modules, and what their code reaches besides,
    held right after the swap.
    """
    saved = Attributes(module, outer)
    own: dict[int, dict[str, dict[str, Any]]] = {
        id(child): {kind: vars(child)[kind] for kind in _REGISTRIES} for child in module.modules()
    }
    stand_ins: dict[int, dict[str, Any]] = {}
    for held in [held for kinds in own.values() for held in kinds.values()]:
        if id(held) not in stand_ins:
            stand_in = stand_ins[id(held)] = copy.copy(held)
            stand_in.update({name: replacement.get(id(tensor), tensor) for name, tensor in held.items()})

    def showing_own(find: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def look_up(other: Any, name: str) -> Any:
            found = find(other, name)
            kinds = own.get(id(original(other))) if name in _SHOWN else None
            if kinds is None:
                return found
            return {**found, **kinds} if name == "__dict__" else kinds[name]

        return look_up

    with replaced_elsewhere(nn.Module, "__getattribute__", showing_own):
        try:
            for child in module.modules():
                for kind, held in own[id(child)].items():
                    vars(child)[kind] = stand_ins[id(held)]
            yield Attributes(module, outer)
        finally:
            saved.restore()


@contextmanager
def uncompiled() -> Generator[None]:
    """Has modules and functions that `torch.compile` made run their own Python code meanwhile.

    Otherwise kernels would be compiled for fake tensors, and the capture would see none of the calls in them.
    """
    if "torch._dynamo" not in sys.modules:
        yield  # nothing was compiled yet, and importing it takes a second
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # The hooks for all modules that it warns of are those of the capture.
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        yield
