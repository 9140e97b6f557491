"""Accelerated: what accelerate's objects do in a trainer whose updates are training steps."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from accelerate import DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from megatrain.compiled.module import CompiledModule


def join(accelerator: Any) -> None:
    """Has an accelerator leave the gradients of a model that streams to training steps.

    A loss counts as in the stock run, where gradients are the mean over the processes.

    Args:
        accelerator: The trainer's; one of a single process stays as it is, unless torchrun has started the process.
    """
    count = accelerator.num_processes
    if accelerator.distributed_type == DistributedType.NO:
        return
    prepare, backward = accelerator.prepare_model, accelerator.backward

    def prepare_model(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        # What is prepared for training is wrapped in DistributedDataParallel, what is prepared for evaluation isn't.
        return prepare(model, device_placement, evaluation_mode or _streams(model))

    def backward_of_part(loss: torch.Tensor, **kwargs: Any) -> None:
        backward(loss / count, **kwargs)

    accelerator.prepare_model, accelerator.backward = prepare_model, backward_of_part


def _streams(model: Any) -> bool:
    return isinstance(model, nn.Module) and any(isinstance(each, CompiledModule) for each in model.modules())


def plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer of torch within accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


def replace_step(optimizer: Any, has_updated: Callable[[torch.optim.Optimizer], bool]) -> None:
    """Replaces the step of accelerate's object around an optimizer, not that of the optimizer.

    Args:
        optimizer: Stays as it is if it isn't accelerate's, or its step was replaced before.
        has_updated: Says that the update was made, so that nothing is left for a step.
    """
    if not isinstance(optimizer, AcceleratedOptimizer) or vars(optimizer).get("step") is not None:
        return
    update: Callable[..., Any] = optimizer.step

    def step(optimizer: Any, closure: Any = None) -> Any:
        return None if has_updated(plain(optimizer)) else update(closure)

    vars(optimizer)["step"] = types.MethodType(step, optimizer)
