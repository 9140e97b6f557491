"""Tells which optimizers are known to update each parameter from that parameter, its gradient and its state alone.

No trial can tell: code may couple parameters from its sixth step on, or above a norm that only real gradients have. So
what isn't known takes its step over all parameters at once, as in a plain loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch

from megatrain.base.checks import checked
from megatrain.base.checks.rules import Rule
from megatrain.errors import OptimizerError
from megatrain.optim.fast import fast_path
from megatrain.optim.proxy import Optimizer, attributes, runs_torchs_code

__all__ = ["is_per_parameter", "register", "unregister"]

Kind = TypeVar("Kind", bound=type[Optimizer])

_OF_PACKAGES = frozenset({"transformers.optimization.Adafactor"})
_DEPTH = 3

_registered: set[type[Optimizer]] = set()
_KIND = Rule(
    "a class of optimizers",
    "{name}=Lion, the class and not an object of it",
    lambda value: None if isinstance(value, type) and issubclass(value, Optimizer) else "is none",
)


@checked(kind=_KIND)
def register(kind: Kind) -> Kind:
    """Promises that the optimizers of a class are per parameter, so that they update one block at a time.

    Their `step` computes a parameter's update from the parameter, its gradient, its state and its group's options. What
    it leaves in options and attributes is the same for any of the parameters, such as a count of steps. It draws no
    random numbers, and keeps nothing else from one parameter to the next. Subclasses are promised on their own.

    Args:
        kind: The class; existing training steps use the promise from their next step on.

    Returns:
        The class, so that this is a decorator too.
    """
    _registered.add(kind)
    return kind


@checked(kind=_KIND)
def unregister(kind: type[Optimizer]) -> None:
    """Takes a promise back; the class's optimizers update all parameters at once from the next step on."""
    _registered.discard(kind)


def is_per_parameter(optimizer: Optimizer) -> bool:
    """Tells whether a step over all parameters is known to be the sum of its steps over some of them.

    Known are the classes of `torch.optim` as torch has them, classes of `register`, and optimizers of which each group
    has a fast path.
    """
    if _has_overrides(optimizer):
        return False
    _ = optimizer.state  # due updates run first, and then the class is its own
    kind = type(optimizer)
    is_known = kind in _registered or f"{kind.__module__}.{kind.__qualname__}" in _OF_PACKAGES
    return is_known or runs_torchs_code(optimizer) or all(fast_path(optimizer, g) for g in optimizer.param_groups)


def check_steps(optimizer: Optimizer) -> None:
    """Refuses an optimizer whose `step` can't be called without arguments, or that trains more than its groups say.

    1. A `step` that can't be called without arguments: it wants a closure, to evaluate the model.
    2. Code that isn't known to be per parameter, and holds a module or parameters of no group in its attributes.

    Raises:
        OptimizerError: With the reason.
    """
    code = inspect.signature(inspect.unwrap(type(optimizer).step))
    wanted = [p.name for p in list(code.parameters.values())[1:] if p.default is p.empty and p.kind not in _VARIADIC]
    if wanted:
        raise _refusal(optimizer, f"its step needs `{wanted[0]}`, which evaluates the model several times")
    if not is_per_parameter(optimizer):
        held = set(_parameters_of(optimizer))
        for name, value in attributes(optimizer).items():
            other = next((item for item in _inside(value) if _trains_others(item, held)), None)
            if other is not None:
                raise _refusal(optimizer, f"its attribute `{name}` holds a {type(other).__name__} outside its groups")


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _refusal(optimizer: Optimizer, reason: str) -> OptimizerError:
    return OptimizerError(
        f"{type(optimizer).__name__} can't update in a training step: {reason}.\n"
        "  A step calls the optimizer's `step` without arguments, once the gradients of its groups are there.\n"
        "  Call optimizer.step() yourself after backward(), or choose an optimizer such as AdamW, SGD or Muon."
    )


def _has_overrides(optimizer: Optimizer) -> bool:
    """Tells whether bitsandbytes has other options for a parameter, which it finds by the position in its group.

    An update of some parameters gives them other positions.
    """
    manager = getattr(optimizer, "mng", None)
    if manager is None:
        return False
    by_module = getattr(manager, "module_weight_config_triple", ())
    overridden = {id(getattr(module, name, None)) for module, name, _ in by_module}
    overridden.update(getattr(manager, "pid2config", {}))
    by_position = bool(getattr(manager, "index2config", None))  # of this optimizer, or another with such positions
    return by_position or any(id(parameter) in overridden for parameter in _parameters_of(optimizer))


def _parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _trains_others(item: Any, held: set[torch.Tensor]) -> bool:
    """Whether code that has this object may train what isn't held, or train by itself."""
    if isinstance(item, Optimizer):
        return any(parameter not in held for parameter in _parameters_of(item))
    return isinstance(item, torch.nn.Module) or (isinstance(item, torch.nn.Parameter) and item not in held)


def _inside(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    yield value
    if depth and isinstance(value, Mapping | list | tuple | set):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _inside(item, depth - 1)
