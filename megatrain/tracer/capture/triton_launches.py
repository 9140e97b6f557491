"""Launches of Triton kernels, which no mode of torch sees, and which take the addresses of tensors as they are.

A tensor without values has the address 0: a launch on it is an access to memory that isn't there, which ends CUDA for
the process. So such a launch is stood in for: the kernel doesn't run, and what it would write is written by a call
that every mode sees. Where nobody can tell what it would write, the launch is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.grad_mode import set_multithreading_enabled

from megatrain.patches import noticed_imports, original_of, replaced_here
from megatrain.torch_private import FakeTensor, disable_current_modes, set_wrap_triton_enabled
from megatrain.tracer.capture.torch_triton import (
    kernel_name,
    launching_methods,
    tensors_in_launch,
    tensors_written,
)
from megatrain.tracer.recording.obstacles import ValuesNeededError
from megatrain.tracer.recording.recorder import Recorder

_Launch = Callable[[Any, Callable[[], Any], tuple[Any, ...], dict[str, Any]], Any]
"""Stands for a launch: the kernel, what launches it, and the arguments."""


@contextmanager
def followed_launches(recorder: Recorder) -> Generator[None]:
    """Follows launches in a forward that is captured.

    Between recorded calls a launch is refused, since it would be lost. Inside one (an `autograd.Function`, a module
    that runs its own code) the kernel runs if all its tensors have values.
    """

    def launch(kernel: Any, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in_launch((args, kwargs))
        if not recorder.is_recording:
            recorder.refuse(
                f"launches the Triton kernel `{kernel_name(kernel)}`",
                "A capture records torch functions; what a kernel writes outside of them would be lost.",
                "Launch it in a torch.autograd.Function or a torch.library.triton_op.",
            )
        written = tensors_written(kernel, args, kwargs)
        if not tensors or written == []:
            recorder.refuse(
                f"launches the Triton kernel `{kernel_name(kernel)}`, which writes none of its tensors,",
                "What it writes by addresses alone can't be seen.",
                "Pass the tensors that it writes to the kernel.",
            )
        has_values = not recorder.runs_on_fakes and not any(map(_has_no_memory, tensors))
        if written is None and has_values:
            return _run_and_compare(run, tensors)
        # Before the kernel runs: a tensor that may not be written is refused while it is as it was.
        _show(kernel, tensors, written)
        return run() if has_values else None

    with _replaced(launch):
        yield


@contextmanager
def launches_on_fakes() -> Generator[None]:
    """Stands in for all launches: the body has no tensors with values, or may not change those that it has."""

    def launch(kernel: Any, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del run
        _show(kernel, tensors_in_launch((args, kwargs)), tensors_written(kernel, args, kwargs) or None)

    with _replaced(launch):
        yield


def _has_no_memory(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _show(kernel: Any, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor] | None) -> None:
    """Shows to all modes, and to the counters of versions, what a launch reads and writes; no value changes.

    The calls take no memory: the first answers a question, the second copies a tensor to itself.

    Raises:
        ValuesNeededError: If it isn't known what the kernel writes.
    """
    if written is None:
        raise ValuesNeededError(
            f"the Triton kernel `{kernel_name(kernel)}` needs tensors with values: "
            "it isn't known which tensors it writes",
            "Load the weights before compiling, or launch it in a torch.library.custom_op with a register_fake.",
        )
    with torch.no_grad():
        for tensor in read:
            torch.is_same_size(tensor, tensor)
        for tensor in written:
            tensor.copy_(tensor)


def _run_and_compare(run: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> Any:
    """Runs a kernel of which nobody knows what it writes, and shows which tensors it has changed."""
    with torch.no_grad():
        with disable_current_modes():
            before = [tensor.clone() for tensor in tensors]
        result = run()
        with disable_current_modes():
            after = {i: t.clone() for i, t in enumerate(tensors) if not _has_bits_of(t, before[i])}
            for index in after:  # one that may not be written is refused while it is as it was
                tensors[index].copy_(before[index])
        for tensor in tensors:
            torch.is_same_size(tensor, tensor)
        for index, content in after.items():
            tensors[index].copy_(content)
    return result


def _has_bits_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    one, two = (each.contiguous().flatten().view(torch.uint8) for each in (tensor, other))
    return torch.equal(one, two)


@contextmanager
def _replaced(launch: _Launch) -> Generator[None]:
    """Makes `launch` what this thread's launches are, also those of a Triton that the body is the first to import.

    What is replaced is what launchers (`kernel[grid]`) call in the end. So it doesn't matter when a launcher was made.
    A backward in the body runs on this thread: autograd's own threads for a device would launch unseen.
    """
    replaced: list[Any] = []
    is_inside = False  # of a launch: a tuner launches the kernel in it

    def replace(stack: ExitStack) -> None:
        for kind, name in launching_methods():
            if kind not in replaced:
                replaced.append(kind)
                stack.enter_context(replaced_here(kind, name, launching(original_of(kind, name))))

    def launching(original: Callable[..., Any]) -> Callable[..., Any]:
        def launched(kernel: Any, /, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside or kwargs.get("warmup"):  # which compiles alone
                return original(kernel, *args, **kwargs)
            given = {name: value for name, value in kwargs.items() if name not in ("grid", "warmup")}
            is_inside = True
            try:
                return launch(kernel, lambda: original(kernel, *args, **kwargs), args, given)
            finally:
                is_inside = False

        return launched

    with ExitStack() as stack:
        stack.enter_context(set_multithreading_enabled(False))
        stack.enter_context(set_wrap_triton_enabled(False))
        stack.enter_context(noticed_imports("triton", partial(replace, stack)))
        replace(stack)
        yield
