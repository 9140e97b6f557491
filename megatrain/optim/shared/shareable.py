"""Tells whether several ranks can divide the updates of an optimizer, whose state they share."""

from __future__ import annotations

import copy
from typing import Any

import torch

from megatrain.device import is_on_host
from megatrain.errors import OptimizerError
from megatrain.optim.impostor import ALIGNED, Optimizer, attributes, is_same, step_code
from megatrain.optim.per_parameter import is_per_parameter
from megatrain.optim.rehearsal import corner, over_stand_ins, random_gradient, unnoticed, with_gradients_it_takes
from megatrain.tracer.packed.packing import is_wrapper

_STEPS = 2


def unshareable(optimizer: Optimizer) -> str | None:
    """Returns why ranks can't share an optimizer's state; None if they can.

    The class takes two steps over small corners of a few parameters. State must be tensors: numbers of Python can't be
    shared. Options and attributes must stay as they are, because each rank updates only some of the parameters.
    """
    if not is_per_parameter(optimizer):
        return f"{type(optimizer).__name__} updates all parameters at once"
    chosen = [parameter for group in optimizer.param_groups for parameter in _few(group["params"])]
    try:
        with unnoticed():
            return with_gradients_it_takes(optimizer, lambda sparse: _reason(optimizer, chosen, sparse=sparse))
    except OptimizerError:
        raise
    except Exception as error:  # the user's optimizer may raise anything on stand-ins
        return f"{type(optimizer).__name__} can't be tried on small stand-ins ({error})"


def _reason(optimizer: Optimizer, chosen: list[torch.Tensor], *, sparse: bool) -> str | None:
    stand_ins = {p: torch.nn.Parameter(corner(p).float(), requires_grad=p.requires_grad) for p in chosen}
    runner = over_stand_ins(optimizer, stand_ins, of_state=corner, keeps_packed=False)
    kind, before = type(optimizer).__name__, _options(runner)
    generator = torch.Generator().manual_seed(0)
    for _ in range(_STEPS):
        for stand_in in stand_ins.values():
            stand_in.grad = random_gradient(stand_in, generator, sparse=sparse)
        step_code(type(optimizer))(runner)
    if not is_same(before, _options(runner)):
        return f"{kind} changes its options in a step"
    state: Any = runner.state
    if any(not isinstance(key, torch.Tensor) for key in state):
        return f"{kind} has state that belongs to no parameter"
    for held in state.values():
        for name, value in held.items():
            if unshareable_value(name, value):
                return f"the state `{name}` of {kind} isn't a plain tensor"
    return None


def unshareable_value(name: Any, value: Any) -> bool:
    """Whether a part of a parameter's state can't be shared."""
    is_plain = isinstance(value, torch.Tensor) and not is_wrapper(value) and value.layout == torch.strided
    return not (is_plain and isinstance(name, str) and is_on_host(value))


def _options(runner: Optimizer) -> list[Any]:
    groups = [{name: value for name, value in group.items() if name not in ALIGNED} for group in runner.param_groups]
    return copy.deepcopy([groups, attributes(runner)])


def _few(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """One parameter of each number of dimensions."""
    return list({parameter.dim(): parameter for parameter in parameters}.values())
