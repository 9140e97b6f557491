"""Tells which optimizers are known to update each parameter from that parameter, its gradient and its state alone.

No trial can tell: code may couple parameters from its sixth step on, or above a norm that only real gradients have. So
what isn't known takes its step over all parameters at once, as in a plain loop.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from megatrain.checks import checked
from megatrain.checks.rules import Rule
from megatrain.errors import OptimizerError
from megatrain.optim.fast import fast_path
from megatrain.optim.proxy import ALIGNED, Optimizer, attributes, impostor, own_copy, runs_torchs_code, step_code
from megatrain.torch_private import (
    ITEM,
    DataDependentOutputException,
    FakeTensor,
    TorchDispatchMode,
    forbid_memory,
    pytree,
    unset_fake_temporarily,
)
from megatrain.tracer.packing import is_wrapper, repacked
from megatrain.tracer.recording.sandbox import uncompiled
from megatrain.tracer.spec import TensorSpec

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


# Rehearsal: an optimizer's own code steps on stand-ins for its parameters, to show what it does.
#
# A stand-in is a small corner of a parameter, or a tensor of its shape that has no memory. The optimizer itself stays
# as it is: the code runs on an impostor over the stand-ins, with state, options and attributes of its own.

Result = TypeVar("Result")

_EDGE = 4


@contextmanager
def unnoticed() -> Generator[None]:
    """Hides the body: no warning is shown, generators stay as they were, and new tensors are on the CPU.

    What `torch.compile` made runs its own Python code: nothing can be compiled for tensors without memory.
    """
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.device("cpu"), uncompiled():
        warnings.simplefilter("ignore")
        yield


def over_stand_ins(
    optimizer: Optimizer,
    stand_ins: Mapping[torch.Tensor, torch.Tensor],
    *,
    of_state: Callable[[torch.Tensor], torch.Tensor],
    of_option: Callable[[Any], Any] = own_copy,
    keeps_packed: bool = True,
) -> Optimizer:
    """Makes an optimizer of the same class over stand-ins, which shares nothing with the one it is made of.

    Args:
        optimizer: The user's.
        stand_ins: By parameter. Parameters without one are left out.
        of_state: Makes the stand-in for a tensor in a parameter's state.
        of_option: Makes the stand-in for an option of a group.
        keeps_packed: False for corners: of a tensor of several inner ones there is none, so state with such a tensor
            is left out, and begins anew.
    """
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        kept = [index for index, parameter in enumerate(group["params"]) if parameter in stand_ins]
        made = {key: of_option(value) for key, value in group.items() if key not in ALIGNED}
        made.update({key: [group[key][i] for i in kept] for key in ALIGNED if key in group})
        made["params"] = [stand_ins[parameter] for parameter in made["params"]]
        groups.append(made)
    state: Any = defaultdict(dict)
    for parameter, stand_in in stand_ins.items():
        if parameter in optimizer.state and (keeps_packed or not _is_packed(optimizer.state[parameter])):
            held: Any = optimizer.state[parameter]
            held = dict(held) if isinstance(held, Mapping) else held
            state[stand_in] = pytree.tree_map(
                lambda leaf: of_state(leaf) if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf), held
            )
    state.update(copy.deepcopy(shared_state(optimizer)))
    return impostor(optimizer, copy.deepcopy(attributes(optimizer)), groups, state)


def give_new_state(optimizers: Sequence[Optimizer], parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Gives a parameter the state that its optimizer makes in a first step, unless it has some; for a load to fill.

    Args:
        optimizers: Of which one holds the parameter.
        parameter: Of a model.
        dtype: Of the values that an update sees.
    """
    optimizer = next(o for o in optimizers if any(parameter is p for group in o.param_groups for p in group["params"]))
    if optimizer.state.get(parameter):
        return
    with unnoticed(), torch.no_grad():
        stand_in = torch.nn.Parameter(torch.zeros_like(parameter, dtype=dtype))
        stand_in.grad = torch.zeros_like(stand_in)
        runner = over_stand_ins(optimizer, {parameter: stand_in}, of_state=torch.clone)
        step_code(type(optimizer))(runner)
    optimizer.state[parameter] = runner.state[stand_in]


def _is_packed(state: Any) -> bool:
    return any(map(is_wrapper, pytree.tree_leaves(dict(state) if isinstance(state, Mapping) else state)))


def shared_state(optimizer: Optimizer) -> dict[Any, Any]:
    """Returns the entries of an optimizer's state that belong to no parameter; some optimizers keep such."""
    state: Any = optimizer.state
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}


def corner(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the first few elements along each dimension; of a tensor on meta zeros on the host."""
    if tensor.is_meta:
        return torch.zeros([min(size, _EDGE) for size in tensor.shape], dtype=tensor.dtype)
    return tensor.detach()[tuple(slice(0, _EDGE) for _ in tensor.shape)].clone()


def random_gradient(parameter: torch.Tensor, generator: torch.Generator, *, sparse: bool) -> torch.Tensor:
    """Returns a gradient for a stand-in, of its shape and dtype."""
    gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return gradient.to_sparse(1) if sparse and gradient.dim() else gradient


def with_gradients_it_takes(optimizer: Optimizer, attempt: Callable[[bool], Result]) -> Result:
    """Tries something with gradients such as the parameters have now, and then with the other kind.

    Some optimizers take sparse gradients only.

    Args:
        optimizer: The user's.
        attempt: Is told whether gradients are sparse.

    Raises:
        OptimizerError: If an attempt does.
        Exception: The error of the first attempt, if both fail: any error of the optimizer's code on its stand-ins.
    """
    is_sparse = any(p.grad is not None and p.grad.is_sparse for g in optimizer.param_groups for p in g["params"])
    causes: list[Exception] = []
    for sparse in (is_sparse, not is_sparse):
        try:
            return attempt(sparse)
        except OptimizerError:
            raise
        except Exception as error:  # an optimizer that takes only one kind may raise anything at the other
            causes.append(error)
    raise causes[0]


def empty(spec: TensorSpec) -> torch.Tensor:
    """Returns a tensor of this spec on the host."""
    if spec.stride is None:
        return torch.empty(spec.shape, dtype=spec.dtype)
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)


def faked(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor like this one without its memory, in the body of a `FakeTensorMode`.

    A number, such as the count of steps, keeps its value.
    """
    if is_wrapper(tensor):
        return repacked(tensor, faked)
    if tensor.numel() != 1 or tensor.is_meta or isinstance(tensor, FakeTensor):
        return empty(TensorSpec.of(tensor))
    with unset_fake_temporarily():
        number = tensor.item()
    return torch.tensor(number, dtype=tensor.dtype).reshape(tensor.shape)


class WithoutValues(TorchDispatchMode):
    """Lets code run on fake tensors: unknown numbers are one half, and memory behind a tensor can't be asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not ITEM:
                raise
            return _one(args[0].dtype)
        # Else `data_ptr()` is 0, and code of C that trusts it ends the process.
        pytree.tree_map_only(FakeTensor, forbid_memory, result)
        return result


def _one(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    # Neither end of the range of a decay: `1 - x` and `1 / x` exist.
    return 0.5 if dtype.is_floating_point else 1
