"""Kernels that no mode of torch sees: those of Triton, and those that TorchScript fuses.

A tensor without values has the address 0: a kernel on it reads memory that isn't there, which ends CUDA for the
process. So such a launch is an error there, and the capture begins again on the values of the weights. Nothing tells
what a kernel of Triton writes: its tensors are compared before and after. Triton itself is never imported here: it is
optional.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch.autograd.grad_mode import set_multithreading_enabled

from megatrain.base.patches import noticed_imports, original_of, replaced_here
from megatrain.base.torch_private import (
    FakeTensor,
    ScriptFunction,
    ScriptMethod,
    disable_current_modes,
    pytree,
    set_wrap_triton_enabled,
)
from megatrain.device import is_on_host
from megatrain.tracer.recording.obstacles import ValuesNeededError
from megatrain.tracer.recording.recorder import Recorder

_Launch = Callable[[Any, Callable[[], Any], tuple[Any, ...], dict[str, Any]], Any]
"""Stands for a launch: the kernel, what launches it, and the arguments."""


@contextmanager
def followed_kernels(recorder: Recorder) -> Generator[None]:
    """Follows them in a forward that is captured.

    Between recorded calls a launch or a call of TorchScript is refused, since it would be lost. Inside one (an
    `autograd.Function`, a module that runs its own code) the kernel runs if all its tensors have values.
    """

    def check_script(function: Any, tensors: list[torch.Tensor]) -> None:
        if tensors and not recorder.is_recording:
            recorder.refuse(
                f"calls the TorchScript function `{function.name}`",
                "A capture records torch functions; results of TorchScript would become constants.",
                "Call the function that was scripted.",
            )
        _check_values(function, tensors)

    def launch(kernel: Any, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = _tensors_in((args, kwargs))
        if not recorder.is_recording:
            recorder.refuse(
                f"launches the Triton kernel `{_name(kernel)}`",
                "A capture records torch functions; what a kernel writes outside of them would be lost.",
                "Launch it in a torch.autograd.Function or a torch.library.triton_op.",
            )
        if not tensors:
            recorder.refuse(
                f"launches the Triton kernel `{_name(kernel)}`, which is given no tensors,",
                "What it writes by addresses alone can't be seen.",
                "Pass the tensors that it writes to the kernel.",
            )
        if recorder.runs_on_fakes or any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
            _refuse(kernel)
        return _run_and_compare(run, tensors)

    with _scripts_checked(check_script), _launches_replaced(launch):
        yield


@contextmanager
def kernels_need_values() -> Generator[None]:
    """Refuses launches of Triton, and TorchScript on an accelerator's tensors without values.

    The body has no tensors with values, or may not change those that it has.
    """
    with _scripts_checked(_check_values), _launches_replaced(lambda kernel, *_: _refuse(kernel)):
        yield


def _check_values(function: Any, tensors: list[torch.Tensor]) -> None:
    # A kernel that TorchScript has fused on earlier calls asks nothing about its tensors.
    if any(isinstance(tensor, FakeTensor) and not is_on_host(tensor) for tensor in tensors):
        raise ValuesNeededError(
            f"the TorchScript function `{function.name}` may be fused, and needs tensors with values"
        )


@contextmanager
def _scripts_checked(check: Callable[[Any, list[torch.Tensor]], None]) -> Generator[None]:
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


def _refuse(kernel: Any) -> NoReturn:
    raise ValuesNeededError(
        f"the Triton kernel `{_name(kernel)}` needs tensors with values",
        "Load the weights before compiling, or launch it in a torch.library.custom_op with a register_fake.",
    )


def _name(kernel: Any) -> str:
    """The name of a kernel's function, whatever is around it."""
    while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return getattr(kernel, "__name__", type(kernel).__name__)


def _tensors_in(values: Any) -> list[torch.Tensor]:
    """Lists the tensors among the arguments of a launch, also those that descriptors (TMA) describe."""
    leaves = pytree.tree_leaves(values)
    described = [leaf if isinstance(leaf, torch.Tensor) else getattr(leaf, "base", None) for leaf in leaves]
    return [tensor for tensor in described if isinstance(tensor, torch.Tensor)]


def _run_and_compare(run: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> Any:
    """Runs a kernel, and shows to all modes, and to the counters of versions, which tensors it read and changed."""
    with torch.no_grad():
        with disable_current_modes():
            before = [tensor.clone() for tensor in tensors]
        result = run()
        with disable_current_modes():
            after = {i: t.clone() for i, t in enumerate(tensors) if not _has_bits_of(t, before[i])}
            for index in after:  # one that may not be written is refused while it is as it was
                tensors[index].copy_(before[index])
        for tensor in tensors:
            torch.is_same_size(tensor, tensor)  # a question, which reads
        for index, content in after.items():
            tensors[index].copy_(content)
    return result


def _has_bits_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    one, two = (each.contiguous().flatten().view(torch.uint8) for each in (tensor, other))
    return torch.equal(one, two)


def _launching_methods() -> list[tuple[Any, str]]:
    """The classes whose methods launch kernels in the end, with the methods, as far as they have been imported."""
    base = getattr(sys.modules.get("triton.runtime.jit"), "KernelInterface", None)
    kinds = [] if base is None else [base]
    for kind in kinds:
        kinds += [each for each in kind.__subclasses__() if each not in kinds]
    found = [(kind, "run") for kind in kinds if "run" in vars(kind)]
    interpreter = getattr(sys.modules.get("triton.runtime.interpreter"), "GridExecutor", None)
    return found if interpreter is None else [*found, (interpreter, "__call__")]


@contextmanager
def _launches_replaced(launch: _Launch) -> Generator[None]:
    """Makes `launch` what this thread's launches are, also those of a Triton that the body is the first to import.

    What is replaced is what launchers (`kernel[grid]`) call in the end. So it doesn't matter when a launcher was made.
    A backward in the body runs on this thread: autograd's own threads for a device would launch unseen.
    """
    replaced: list[Any] = []
    is_inside = False  # of a launch: a tuner launches the kernel in it

    def replace(stack: ExitStack) -> None:
        for kind, name in _launching_methods():
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
