"""Runs a model's forward on fake state, watched by a recorder, and leaves no trace of it in the model."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatrain.base.patches import replaced_elsewhere
from megatrain.base.torch_private import TorchDispatchMode
from megatrain.tracer.python.names import Outer
from megatrain.tracer.python.snapshot import Snapshot
from megatrain.tracer.recording.effect_watch import gives_own_memory
from megatrain.tracer.recording.module_calls import (
    followed_calls,
    followed_counts,
    kept_dtypes,
    noticed_backwards,
    recorded_functions,
    recorded_maps,
)
from megatrain.tracer.recording.obstacles import Attempt
from megatrain.tracer.recording.python_effects import Hooks
from megatrain.tracer.recording.recorder import Recorder
from megatrain.tracer.recording.unseen_kernels import followed_kernels
from megatrain.tracer.source_line import original, own_code


class _StrayWatch(TorchDispatchMode):
    """Reports operations that run while no torch function is being recorded."""

    def __init__(self, recorder: Recorder, report: Callable[[Any], None]) -> None:
        super().__init__()
        self._recorder = recorder
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if gives_own_memory(func, args):
            return args[0]
        # `prim` holds questions (`x.is_cuda` of a fake tensor arrives here) that have no tensor as an answer.
        if not self._recorder.is_recording and func.namespace != "prim":
            self._report(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def watching(
    recorder: Recorder, model: nn.Module, hooks: Hooks, attempt: Attempt, report: Callable[[Any], None]
) -> Generator[None]:
    """Has the recorder see all that the body, one run of the model's forward on this thread, does.

    Args:
        report: Called with each operation that no torch function has called: results of TorchScript and of C++
            extensions would become constants.
    """
    with (
        # First what changes which Python code runs: code that was compiled, and hooks, which are put around the
        # user's while modules still call the originals.
        uncompiled(),
        hooks.followed(),
        # A dispatch mode lies below all function modes, so it sees what these have let pass.
        _StrayWatch(recorder, report),
        # Calls that no function mode sees, each replaced by one that records. Their order among each other doesn't
        # matter: each has functions of its own.
        followed_calls(recorder, model, attempt),
        recorded_functions(recorder),
        followed_kernels(recorder),
        recorded_maps(recorder),
        kept_dtypes(recorder),
        followed_counts(recorder),
        noticed_backwards(recorder),
        # Then the recorder: modes of the user's are entered in the body, so they come before it, as in eager.
        recorder,
        # Last, because what it replaces is torch's own, and meant for the user's code alone.
        own_code(),
    ):
        yield


_REGISTRIES = ("_parameters", "_buffers")
_SHOWN = ("__dict__", *_REGISTRIES)


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
            yield saved.with_registries(module, stand_ins)
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
