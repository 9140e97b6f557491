"""Triton: launches of its kernels, which no mode sees, and which read the memory that tensors without values lack."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch.autograd.grad_mode import set_multithreading_enabled

from megatrain.patches import original_of, replaced_here
from megatrain.torch_private import FakeTensor, pytree
from megatrain.tracer.recording.recorder import Recorder


@contextmanager
def followed_launches(recorder: Recorder) -> Generator[None]:
    """Refuses launches in code that is recorded, and in an `autograd.Function` on tensors without values.

    Then the module around runs its own code.
    """

    def check(kernel: Any, tensors: list[torch.Tensor]) -> None:
        if tensors and not recorder.is_recording:
            recorder.refuse(
                f"launches the Triton kernel `{_name(kernel)}`",
                "A capture records torch functions on tensors without values; a kernel would read memory at address 0.",
                "Launch the kernel in a torch.library.custom_op, which says what it makes (register_fake).",
            )
        _check_values(kernel, tensors)

    with _checked(check):
        yield


@contextmanager
def launches_on_values() -> Generator[None]:
    """Refuses launches on tensors without values, which would end the process or the device's context."""
    with _checked(_check_values):
        yield


def _check_values(kernel: Any, tensors: list[torch.Tensor]) -> None:
    if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
        raise RuntimeError(f"the Triton kernel `{_name(kernel)}` needs tensors with values")


def _name(kernel: Any) -> str:
    return str(getattr(kernel, "__name__", None) or getattr(getattr(kernel, "fn", kernel), "__name__", "?"))


@contextmanager
def _checked(check: Callable[[Any, list[torch.Tensor]], None]) -> Generator[None]:
    # Triton isn't imported here: where nobody has, there is no kernel.
    kind: Any = getattr(sys.modules.get("triton.runtime.jit"), "KernelInterface", None)
    if kind is None:
        yield
        return
    original: Any = original_of(kind, "__getitem__")
    thread, is_over = get_ident(), False

    def get(kernel: Any, grid: Any) -> Callable[..., Any]:
        launch = original(kernel, grid)

        def checked(*args: Any, **kwargs: Any) -> Any:
            if not is_over and get_ident() == thread:  # the user's code may keep it
                check(kernel, [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)])
            return launch(*args, **kwargs)

        return checked

    # A backward would run on a thread of the device's own, whose launches nobody checks.
    with set_multithreading_enabled(False), replaced_here(kind, "__getitem__", get):
        try:
            yield
        finally:
            is_over = True
