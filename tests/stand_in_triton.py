"""A stand-in for the package Triton, which isn't installed where these tests run: its kernels are Python functions.

It has the few names that megatrain looks at. A launch runs the function once on the tensors that it is given, and
fails on tensors without values, where a real one would use an address that isn't theirs. Which arguments a kernel
writes, which torch finds out of a real one, is said where the kernel is made; or that torch can't find out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from megatrain.torch_private import FakeTensor
from megatrain.tracer.capture import torch_triton

NAMES = ("triton.runtime.jit", "triton.runtime.autotuner")
"""Of the modules; without the package itself, which torch would look into."""


# As Triton's own: `run` is looked up at the launch. Its line is no user's: its module is Triton's.
_LAUNCHER = eval(
    "lambda self, grid: lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)",
    {"__name__": NAMES[0]},
)


class KernelInterface:
    """What is launched as `kernel[grid](...)`."""

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return _LAUNCHER(self, grid)


@dataclass(frozen=True)
class Parameter:
    """An argument of a kernel."""

    name: str
    is_constexpr: bool


class JITFunction(KernelInterface):
    """A kernel.

    Args:
        fn: What it does, on real tensors.
        written: Names of the arguments that it writes; None if torch can't analyse it.
    """

    def __init__(self, fn: Callable[..., None], written: Sequence[str] | None) -> None:
        self.fn, self.__name__ = fn, fn.__name__
        self.written = None if written is None else frozenset(written)
        self.arg_names = list(fn.__code__.co_varnames[: fn.__code__.co_argcount])
        self.params = [Parameter(name, name.isupper()) for name in self.arg_names]
        self.pre_run_hooks: list[Any] = []
        self.launched: list[int] = []

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values())):
            raise AssertionError(f"{self.__name__} was launched on a tensor without values")
        self.launched.append(grid)
        with torch._C._DisableTorchDispatch(), torch.no_grad():  # no mode sees what a kernel does
            given = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
            self.fn(*given, **{k: v.data if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()})
        return "compiled kernel"


class Autotuner(KernelInterface):
    """A kernel with configurations, of which the first is taken."""

    def __init__(self, fn: Any, configs: Sequence[Any], reset_to_zero: Sequence[str] = ()) -> None:
        self.fn, self.configs, self.arg_names = fn, configs, fn.arg_names
        self.reset_to_zero, self.restore_value = list(reset_to_zero), list[str]()
        self.user_defined_pre_hook = self.user_defined_post_hook = False

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs, **self.configs[0].kwargs)


@dataclass(frozen=True)
class Config:
    """Arguments that a tuner adds."""

    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    pre_hook: Any = None


class Heuristics(KernelInterface):
    """A kernel some of whose arguments are computed of others."""

    def __init__(self, fn: Any, values: Mapping[str, Callable[[Mapping[str, Any]], Any]]) -> None:
        self.fn, self.values, self.arg_names = fn, values, fn.arg_names

    def run(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.arg_names, args, strict=False))
        return self.fn.run(*args, **kwargs, **{name: value({**given, **kwargs}) for name, value in self.values.items()})


def modules() -> dict[str, ModuleType]:
    """The modules of the package, by their names."""
    found = {name: ModuleType(name) for name in NAMES}
    vars(found["triton.runtime.jit"]).update(KernelInterface=KernelInterface, JITFunction=JITFunction)
    vars(found["triton.runtime.autotuner"]).update(Autotuner=Autotuner, Heuristics=Heuristics)
    return found


@contextmanager
def stand_in_triton(*, is_imported: bool = True) -> Generator[dict[str, ModuleType]]:
    """Puts the package where an import finds it, and lets its kernels say what they write; yields its modules.

    Args:
        is_imported: It is there from the beginning. Without, the caller adds the modules to `sys.modules`.
    """
    made = modules()
    before = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    sys.modules.update(made if is_imported else {})
    try:
        with mock.patch.object(torch_triton, "_analysed", lambda kernel, given: kernel.written):
            yield made
    finally:
        for name in NAMES:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def names_written(
    kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> str | None:
    """The names of the tensors that a launch is found to write; None if it isn't known.

    Args:
        kernel: Of the stand-in, or of the real package.
        args: Its positional arguments, with names in place of tensors.
        kwargs: The others.
        tensors: By name, of one letter each.
    """

    def given(value: Any) -> Any:
        return tuple(map(given, value)) if isinstance(value, tuple) else tensors.get(value, value)

    found = torch_triton.tensors_written(kernel, given(tuple(args)), {name: given(v) for name, v in kwargs.items()})
    if found is None:
        return None
    return "".join(name for name, tensor in tensors.items() if any(tensor is each for each in found))
