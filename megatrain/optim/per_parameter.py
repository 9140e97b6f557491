"""Tells whether an optimizer's step over all parameters is the sum of its steps over some of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatrain.errors import OptimizerError
from megatrain.optim.impostor import ALIGNED, Optimizer, OptimizerStep, attributes, is_same, step_code
from megatrain.optim.rehearsal import (
    corner,
    over_stand_ins,
    random_gradient,
    shared_state,
    unnoticed,
    with_gradients_it_takes,
)

_STEPS = 3
_RATE = 0.01
_DEPTH = 3


def check_per_parameter(optimizer: Optimizer, *, probe: bool = True) -> None:
    """Refuses an optimizer that needs all parameters at once.

    1. A `step` that can't be called without arguments: it wants a closure, to evaluate the model.
    2. Parameters, modules or other optimizers in attributes: the code may use them instead of the groups. 3. With
    `probe`, what a trial shows: the class takes three steps over small corners of up to two parameters
       of each kind in each group, once whole and once one by one in reverse order. Parameters, state, options
       and attributes must agree bit for bit. The trial touches neither the optimizer nor any generator.

    Raises:
        OptimizerError: With the reason.
    """
    code = inspect.signature(inspect.unwrap(type(optimizer).step))
    wanted = [p.name for p in list(code.parameters.values())[1:] if p.default is p.empty and p.kind not in _VARIADIC]
    if wanted:
        raise _refusal(optimizer, f"its step needs `{wanted[0]}`, which evaluates the model several times")
    parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for name, value in attributes(optimizer).items():
        held = next((item for item in _inside(value) if _is_held(item, parameters)), None)
        if held is not None:
            raise _refusal(optimizer, f"its attribute `{name}` holds a {type(held).__name__} outside its groups")
    if _has_overrides(optimizer, parameters):
        raise _refusal(
            optimizer, "options of single parameters were overridden by their positions (GlobalOptimManager)"
        )
    if probe:
        with unnoticed():
            difference = _try(optimizer)
        if difference is not None:
            raise _refusal(optimizer, f"steps over single parameters give another {difference}")


def _has_overrides(optimizer: Optimizer, parameters: set[torch.Tensor]) -> bool:
    """Tells whether bitsandbytes has other options for a parameter, which it finds by the position in its group.

    An update of some parameters gives them other positions.
    """
    manager = getattr(optimizer, "mng", None)
    by_module = getattr(manager, "module_weight_config_triple", ())
    overridden = {id(getattr(module, name, None)) for module, name, _ in by_module}
    overridden.update(getattr(manager, "pid2config", {}))
    by_position = bool(getattr(manager, "index2config", None))  # of this optimizer, or another with such positions
    return by_position or any(id(parameter) in overridden for parameter in parameters)


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _refusal(optimizer: Optimizer, reason: str) -> OptimizerError:
    return OptimizerError(
        f"{type(optimizer).__name__} can't update one block at a time: {reason}.\n"
        "  A block is updated while others still compute, so a parameter's update may only depend on the parameter,\n"
        "  its gradient and its state.\n"
        "  Call optimizer.step() yourself after backward(), or choose an optimizer such as AdamW, SGD or Muon."
    )


def _is_held(item: Any, parameters: set[torch.Tensor]) -> bool:
    if isinstance(item, torch.Tensor):
        return isinstance(item, torch.nn.Parameter) or item in parameters
    return isinstance(item, torch.nn.Module | Optimizer)


def _inside(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    yield value
    if depth:
        items = value.values() if isinstance(value, Mapping) else value
        if isinstance(value, Mapping | list | tuple | set):
            for item in items:
                yield from _inside(item, depth - 1)


def _try(optimizer: Optimizer) -> str | None:
    """Returns a difference after a few steps, or None."""
    try:
        return with_gradients_it_takes(optimizer, lambda sparse: _difference(optimizer, sparse=sparse))
    except OptimizerError:
        raise
    except Exception as error:  # the user's optimizer may raise anything on stand-ins
        why = f"it can't be tried on small stand-ins ({error})"
        raise _refusal(optimizer, why) from error


def _difference(optimizer: Optimizer, *, sparse: bool) -> str | None:
    chosen = [parameter for group in optimizer.param_groups for parameter in _few(group["params"])]
    whole, parts = (
        over_stand_ins(optimizer, {p: _stand_in(p, optimizer) for p in chosen}, of_state=corner, keeps_packed=False)
        for _ in range(2)
    )
    code = step_code(type(optimizer))
    pairs = [
        (one, other)
        for mine, theirs in zip(whole.param_groups, parts.param_groups, strict=True)
        for one, other in zip(mine["params"], theirs["params"], strict=True)
    ]
    for group in (*whole.param_groups, *parts.param_groups):
        if "lr" in group:
            group["lr"] = _visible(group["lr"])
    generator = torch.Generator().manual_seed(0)
    for _ in range(_STEPS):
        for one, other in pairs:
            one.grad = random_gradient(one, generator, sparse=sparse)
            other.grad = one.grad.clone()
        code(whole)
        step = OptimizerStep(parts, code)
        for parameter in reversed(step.parameters):
            step.update({parameter})
        step.commit()
    return _compare(whole, parts, pairs)


def _visible(rate: Any) -> Any:
    """A learning rate at which steps change values: schedulers that warm up begin at 0, and then all steps agree."""
    if isinstance(rate, torch.Tensor):
        return rate.clamp(min=_RATE)
    return max(rate, _RATE) if isinstance(rate, int | float) else rate


def _compare(whole: Optimizer, parts: Optimizer, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> str | None:
    for one, other in pairs:
        if not is_same(one.detach(), other.detach()):
            return f"value of a {tuple(one.shape)} parameter"
        mine, theirs = whole.state.get(one, {}), parts.state.get(other, {})
        for key in mine.keys() | theirs.keys():
            if not (key in mine and key in theirs and is_same(mine[key], theirs[key])):
                return f"`{key}` in the state of a parameter"
    for mine, theirs in zip(_beside(whole), _beside(parts), strict=True):
        for key in mine.keys() | theirs.keys():
            if not (key in mine and key in theirs and is_same(mine[key], theirs[key])):
                return f"`{key}`"
    return None


def _beside(optimizer: Optimizer) -> list[dict[Any, Any]]:
    """Returns the values of an optimizer that belong to no single parameter."""
    groups = [{k: v for k, v in group.items() if k not in ALIGNED} for group in optimizer.param_groups]
    return [*groups, shared_state(optimizer), attributes(optimizer)]


def _few(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns up to two parameters of each kind."""
    kinds: dict[object, list[torch.Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dim(), parameter.dtype), []).append(parameter)
    return [parameter for alike in kinds.values() for parameter in alike[:2]]


def _stand_in(parameter: torch.Tensor, optimizer: Optimizer) -> torch.Tensor:
    """Returns the corner of a parameter, in fp32 if its state says that an fp32 master is what the code updates."""
    held: Any = optimizer.state.get(parameter, {}).values()
    is_wide = any(isinstance(v, torch.Tensor) and v.dim() and v.dtype == torch.float32 for v in held)
    values = corner(parameter)
    values = values.float() if is_wide and values.dtype == torch.bfloat16 else values
    return torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
