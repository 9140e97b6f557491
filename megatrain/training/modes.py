"""Modes: due updates run as on their usual thread, in any mode of the caller; a model trains in training mode."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from torch import nn

from megatrain.base.torch_private import (
    DropoutNd,
    disable_current_modes,
    function_modes,
    pop_function_mode,
    preserve_dispatch_keys,
    send_to_meta_kernels,
)
from megatrain.errors import TrainStepWarning
from megatrain.runtime.engine import ordinary_tensors


@contextmanager
def without_modes() -> Generator[None]:
    """Runs the body outside of inference mode, fake tensors, function modes and another default device (one of these).

    A dropped step is completed when Python collects it, perhaps while another model is made on meta, or in the middle
    of a fake tensor's kernel.
    """
    with ordinary_tensors(), ExitStack() as function_modes_left, disable_current_modes(), preserve_dispatch_keys():
        for _ in function_modes():
            function_modes_left.enter_context(pop_function_mode())
        send_to_meta_kernels(False)
        yield


def warn_of_dropout(model: nn.Module) -> None:
    """Warns of dropout that is off because the model is in eval mode, as `from_pretrained` returns it.

    What is in eval mode and has nothing to train (a frozen encoder, a dropout alone) is taken to be so on purpose.
    """
    for place, module in model.named_modules():
        if module.training or not any(p.requires_grad for p in module.parameters()):
            continue
        off = [name for name, each in module.named_modules(prefix=place) if not each.training and _probability(each)]
        if off:
            more = f" and {len(off) - 1} more" if len(off) > 1 else ""
            warnings.warn(
                f"the model trains without dropout: `{off[0]}`{more} is in eval mode, as from_pretrained() leaves it.\n"
                "  A step computes what the model computes in its present mode, as eager PyTorch does.\n"
                "  Call model.train() before the steps; for a training without dropout, set its probability to 0.",
                TrainStepWarning,
                stacklevel=5,
            )
            return


def _probability(module: nn.Module) -> float:
    """With which probability a module of torch drops values in training mode."""
    if isinstance(module, DropoutNd):
        return module.p
    return module.dropout if isinstance(module, nn.MultiheadAttention | nn.RNNBase) else 0.0
