"""exact_fakes(): a mode of tensors that have no values, for runs without memory."""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from megatrain.torch_private import FakeTensor, FakeTensorMode, pytree
from megatrain.tracer.recording.obstacles import unprinted_failures
from megatrain.tracer.recording.unseen_kernels import kernels_need_values


@contextmanager
def exact_fakes(*, allow_non_fake_inputs: bool = False) -> Generator[FakeTensorMode]:
    """A mode in which tensors have no values, and kernels that no mode sees aren't run on them.

    TorchScript on an accelerator is an error, and so are launches of Triton kernels. A kernel that fails raises,
    and nothing is printed.

    Args:
        allow_non_fake_inputs: Whether tensors with values may be used as well. Those that are written have their values
            back at the end.
    """
    fakes = ExactFakes(allow_non_fake_inputs=allow_non_fake_inputs)
    try:
        with unprinted_failures(), kernels_need_values(), fakes as mode:
            yield mode
    finally:
        for tensor, before in reversed(fakes.written):
            tensor.data.copy_(before)


class ExactFakes(FakeTensorMode):
    """A mode of fake tensors that share storages just as real ones would; torch's cache serves it where it can.

    From the cache, a kernel that returns one tensor twice gives two, so that figures would depend on earlier runs in
    the process. Only kernels of one result are looked up there, which halves the time of a run.

    Attributes:
        written: Tensors with values before each write into one: a kernel all of whose tensors have values runs.
        repeats: How often a kernel counts that runs now.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.written: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.repeats = 1

    @contextmanager
    def repeated(self, number: int) -> Generator[None]:
        """Lets kernels stand for so many that are alike."""
        self.repeats = number
        try:
            yield
        finally:
            self.repeats = 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.allow_non_fake_inputs and func._schema.is_mutable:
            given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            if not any(isinstance(each, FakeTensor) for each in given):
                self.written += [(each, each.detach().clone()) for each in given]
        before, self.cache_enabled = self.cache_enabled, _has_one_result(func)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.cache_enabled = before


@functools.cache
def _has_one_result(func: Any) -> bool:
    found = func._schema.returns
    return len(found) == 1 and isinstance(found[0].real_type, torch.TensorType)
