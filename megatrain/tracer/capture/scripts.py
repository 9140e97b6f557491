"""TorchScript: its calls, which no mode for torch functions sees, and which it fuses for accelerators."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from megatrain.device import is_on_host
from megatrain.patches import original_of, replaced_here
from megatrain.torch_private import FakeTensor, ScriptFunction, ScriptMethod, pytree
from megatrain.tracer.recording.obstacles import ValuesNeededError
from megatrain.tracer.recording.recorder import Recorder


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
