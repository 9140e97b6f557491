"""Optimizers: one, or several that take each step together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from megatrain.base.checks.rules import Rule, instance_of, sequence_of
from megatrain.errors import OptimizerError

Optimizers = Optimizer | Sequence[Optimizer]
"""One, or several whose steps follow each other in this order."""

_ONE = instance_of(Optimizer, "an optimizer of torch")
_LIST = sequence_of(_ONE)


def several_fault(value: Any) -> str | None:
    """Completes "optimizer=... " for a value that is no list of different optimizers."""
    fault = _LIST.fault(value)
    if fault is not None or not value:
        return fault or "is empty"
    twice = next((i for i, each in enumerate(value) if any(each is other for other in value[:i])), None)
    return None if twice is None else f"has one optimizer twice: as item {twice}, and before"


def _fault(value: Any) -> str | None:
    return several_fault(value) if isinstance(value, list | tuple) else _ONE.fault(value)


OPTIMIZERS = Rule(
    "an optimizer of torch, or a list of different ones", "torch.optim.AdamW(compiled.parameters()), say", _fault
)


def optimizers_of(given: Optimizers) -> tuple[Optimizer, ...]:
    """Returns all optimizers, in their order."""
    return (given,) if isinstance(given, Optimizer) else tuple(given)


def parameters_of(*optimizers: Optimizer) -> list[torch.Tensor]:
    """Returns the parameters in the groups of some optimizers, in order."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def check_apart(optimizers: Sequence[Optimizer], names: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuses optimizers of which two hold the same parameter."""
    if len(optimizers) < 2:
        return
    holder: dict[torch.Tensor, Optimizer] = {}
    for optimizer in optimizers:
        for parameter in parameters_of(optimizer):
            first = holder.setdefault(parameter, optimizer)
            if first is not optimizer:
                name = next((f"`{name}`" for name, tensor in names if tensor is parameter), None)
                kinds = f"{type(first).__name__} and {type(optimizer).__name__}"
                raise OptimizerError(
                    f"two optimizers, {kinds}, hold the parameter {name or tuple(parameter.shape)}.\n"
                    "  A step updates each parameter once, by the one optimizer that holds the parameter.\n"
                    "  Make one of the two without this parameter."
                )
