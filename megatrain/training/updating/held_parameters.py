"""Held parameters: an optimizer holds some of those that a step trains, and none has a gradient before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from megatrain.checks.several_optimizers import parameters_of
from megatrain.errors import ExecuteError, OptimizerError
from megatrain.optim.impostor import Optimizer


def check_held(optimizers: Sequence[Optimizer], blocks: Sequence[Sequence[torch.Tensor]]) -> None:
    """Refuses optimizers without any of the parameters.

    Args:
        optimizers: Of a step.
        blocks: The parameters that are updated with each block.

    Raises:
        OptimizerError: If there is none.
    """
    held = set(map(id, parameters_of(*optimizers)))
    if not any(id(p) in held for block in blocks for p in block):
        subject = "the optimizer holds" if len(optimizers) == 1 else "the optimizers hold"
        raise OptimizerError(
            f"{subject} none of the parameters that the model trains.\n"
            "  A step updates only parameters of the optimizer.\n  Make the optimizer from compiled.parameters()."
        )


def check_no_gradients(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses parameters that have a gradient already.

    Args:
        tensors: By name.

    Raises:
        ExecuteError: If there are some.
    """
    for key, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
            raise ExecuteError(
                f"parameter `{key}` has a `.grad` already.\n"
                "  A step uses the gradients of its own batch only, with all micro-batches, and leaves none.\n"
                "  Call optimizer.zero_grad(), or pass the data of the other backward to the step, as a micro-batch."
            )
