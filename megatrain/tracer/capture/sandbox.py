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

from megatrain.device import is_on_host
from megatrain.patches import original_of, replaced_elsewhere, replaced_here
from megatrain.torch_private import FakeTensor, FakeTensorMode, ScriptFunction, ScriptMethod, pytree
from megatrain.tracer.python.names import Outer
from megatrain.tracer.python.snapshot import Snapshot
from megatrain.tracer.recording.obstacles import ValuesNeededError
from megatrain.tracer.recording.recorder import Recorder
from megatrain.tracer.source_line import original


@contextmanager
def followed_scripts(recorder: Recorder) -> Generator[None]:
    """Refuses calls of TorchScript in code that is recorded, whether it runs op by op or in kernels of its own."""

    def check(function: Any, tensors: list[torch.Tensor]) -> None:
        if tensors and not recorder.is_recording:
            recorder.refuse(
                f"calls the TorchScript function `{function.name}`",
                "A capture records torch functions; results of TorchScript would become constants.",
                "Call the function that was scripted.",
            )
        _check_values(function, tensors)

    with _checked(check):
        yield


@contextmanager
def scripts_on_values() -> Generator[None]:
    """Refuses TorchScript on an accelerator's tensors without values.

    A kernel that it has fused on earlier calls would read the memory that these tensors lack; nothing in torch asks
    what kind of tensors they are.
    """
    with _checked(_check_values):
        yield


def _check_values(function: Any, tensors: list[torch.Tensor]) -> None:
    if any(isinstance(tensor, FakeTensor) and not is_on_host(tensor) for tensor in tensors):
        raise ValuesNeededError(
            f"the TorchScript function `{function.name}` may be fused, and needs tensors with values"
        )


@contextmanager
def _checked(check: Callable[[Any, list[torch.Tensor]], None]) -> Generator[None]:
    def checking(kind: Any) -> Callable[..., Any]:
        original: Any = original_of(kind, "__call__")

        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            check(function, [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)])
            return original(function, *args, **kwargs)

        return call

    with (
        replaced_here(ScriptFunction, "__call__", checking(ScriptFunction)),
        replaced_here(ScriptMethod, "__call__", checking(ScriptMethod)),
    ):
        yield


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
) -> Generator[Snapshot]:
    """Lets this thread find `replacement[id(tensor)]` where `module` holds a tensor.

    Modules get registries of their own for the body, so that the model's own ones are never touched: other threads go
    on finding those. At the end all changes are undone. Yields what the modules, and what their code reaches besides,
    held right after the swap.
    """
    saved = Snapshot(module, outer)
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
            yield Snapshot(module, outer)
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
