"""Tells when a model's own code runs on this thread, and which model an object stands for."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import nn

from megatrain.patches import original_of, replaced_here


class StandIn(nn.Module):
    """Another object over a model's own `__dict__`; the model itself is what is captured."""

    @property
    def __original__(self) -> nn.Module:
        raise NotImplementedError


def original(module: nn.Module) -> nn.Module:
    """Returns the model that `module` stands for, or `module` itself."""
    if not isinstance(module, StandIn):
        return module
    # Past the hook that records which attributes a forward reads.
    return object.__getattribute__(module, "__original__")


_running = threading.local()


@contextmanager
def own_code() -> Generator[None]:
    """Marks the body as a run of a model's own code, by a capture or an opaque module.

    A tool that replaces a compiled model's `forward` by a function around the former one (autocast, a fused head) has
    that former one called here: the model's own forward is meant then, and not another call of the compiled model.
    """
    depth = getattr(_running, "depth", 0)
    _running.depth = depth + 1
    try:
        with (
            replaced_here(nn.RNNBase, "flatten_parameters", _keep_layout),
            replaced_here(
                torch.utils, "swap_tensors", functools.partial(_swap, original_of(torch.utils, "swap_tensors"))
            ),
        ):
            yield
    finally:
        _running.depth = depth


def _keep_layout(module: nn.RNNBase) -> None:
    """Leaves the weights of an RNN where they are: the layout of a slot is the schedule's.

    An RNN that finds other weights than in its last call moves these on CUDA into one piece of memory, in cuDNN's
    order. The results are the same without; cuDNN then makes such a piece for each call.
    """


def _swap(swap: Callable[[torch.Tensor, torch.Tensor], None], one: torch.Tensor, other: torch.Tensor) -> None:
    """Leaves a tensor that is swapped with itself: torch refuses that for stand-ins, to which weak references exist.

    `torch.nn.utils.parametrize` does so if `torch.__future__.set_swap_module_params_on_conversion` was called.
    """
    if one is not other:
        swap(one, other)


def runs_own_code() -> bool:
    """Tells whether a model's own code runs on this thread."""
    return getattr(_running, "depth", 0) > 0
