"""Triton's kernels, and what a launch of one writes. Triton itself is never imported here: it is optional.

Torch reads off a kernel's code which arguments it writes, for compiled models. That function is private and has had
two names; where a torch has neither, or where it can't read a kernel, it isn't known what the kernel writes.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch

from megatrain.torch_private import DisableTorchFunction, disable_current_modes, pytree
from megatrain.tracer.recording.obstacles import unprinted_failures

_Given = dict[str, Any]
# Arguments that are one parameter of a compiled kernel each: by position, torch finds the written ones.
_SINGLE = (torch.Tensor, bool, int, float)

_lock = threading.Lock()
_known: dict[Any, tuple[Any, frozenset[str] | None]] = {}


def launching_methods() -> list[tuple[Any, str]]:
    """The classes whose methods launch kernels in the end, with the methods, as far as they have been imported."""
    base = _imported("triton.runtime.jit", "KernelInterface")
    kinds = [] if base is None else [base]
    for kind in kinds:
        kinds += [each for each in kind.__subclasses__() if each not in kinds]
    found = [(kind, "run") for kind in kinds if "run" in vars(kind)]
    interpreter = _imported("triton.runtime.interpreter", "GridExecutor")
    return found if interpreter is None else [*found, (interpreter, "__call__")]


def kernel_name(kernel: Any) -> str:
    """The name of a kernel's function, whatever is around it."""
    while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return getattr(kernel, "__name__", type(kernel).__name__)


def tensors_in_launch(values: Any) -> list[torch.Tensor]:
    """Lists the tensors among the arguments of a launch, also those that descriptors (TMA) describe."""
    leaves = pytree.tree_leaves(values)
    described = [leaf if isinstance(leaf, torch.Tensor) else getattr(leaf, "base", None) for leaf in leaves]
    return [tensor for tensor in described if isinstance(tensor, torch.Tensor)]


def tensors_written(kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
    """Lists the tensors that a launch may write; None if it isn't known.

    Args:
        kernel: A function of `triton.jit`, or what `triton.autotune` and `triton.heuristics` put around one.
        args: The positional arguments.
        kwargs: The others.
    """
    given = dict(zip(getattr(kernel, "arg_names", ()), args, strict=False)) | dict(kwargs)
    names = _written(kernel, given) if len(given) == len(args) + len(kwargs) else None
    if names is None:
        return None
    return tensors_in_launch([value for name, value in given.items() if name in names])


def _written(kernel: Any, given: _Given) -> frozenset[str] | None:
    """The names of the written arguments; None if they aren't known."""
    jit = _imported("triton.runtime.jit", "JITFunction")
    more: set[str] = set()
    while type(kernel) is not jit:
        found = _inside(kernel, given)
        if found is None:
            return None
        given, own = found
        more |= own
        kernel = kernel.fn
    parameters = inspect.signature(kernel.fn).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    given = defaults | given
    constant = {p.name for p in kernel.params if p.is_constexpr}
    values = {name: given[name] for name in parameters if name in given}
    is_read = len(values) == len(parameters) and all(
        name in constant or value is None or isinstance(value, _SINGLE) for name, value in values.items()
    )
    if not is_read or kernel.pre_run_hooks:
        return None
    names = _analysed_once(kernel, values, constant)
    return None if names is None else names | more


def _inside(kernel: Any, given: _Given) -> tuple[_Given, set[str]] | None:
    """What a kernel's wrapper adds to the arguments, and the names of those that it writes; None if it isn't known."""
    if isinstance(kernel, _imported("triton.runtime.autotuner", "Autotuner") or ()):
        hooks = [kernel.user_defined_pre_hook, kernel.user_defined_post_hook, *(c.pre_hook for c in kernel.configs)]
        if any(hooks):
            return None
        # All configurations compute the same; torch, too, looks at the first alone.
        return {**given, **kernel.configs[0].kwargs}, {*kernel.reset_to_zero, *kernel.restore_value}
    if isinstance(kernel, _imported("triton.runtime.autotuner", "Heuristics") or ()):
        found = dict(given)
        for name, value in kernel.values.items():
            try:
                found[name] = value(found)
            except Exception:  # of any type, by a function that wants values: nothing is known then
                return None
        return found, set()
    return None


def _analysed_once(kernel: Any, given: _Given, constant: set[str]) -> frozenset[str] | None:
    """What torch finds, remembered by all that it may depend on."""
    with disable_current_modes(), DisableTorchFunction():
        stand_ins = {name: value if name in constant else _stand_in(value) for name, value in given.items()}
        key: Any = (id(kernel), *(_described(name in constant, value) for name, value in stand_ins.items()))
        try:
            hash(key)
        except TypeError:  # an argument of the compiler that is a list, say
            return _analysed(kernel, stand_ins)
        with _lock:
            if key not in _known:
                _known[key] = (kernel, _analysed(kernel, stand_ins))  # alive, so that its id stays its own
            return _known[key][1]


def _stand_in(value: Any) -> Any:
    """A small argument of the same type: a whole number of 1 might be taken for one that the compiler knows."""
    if isinstance(value, torch.Tensor):
        return torch.empty(2, dtype=value.dtype)
    if isinstance(value, int) and not isinstance(value, bool):
        return 2 if abs(value) < 1 << 31 else 1 << 40
    return value


def _described(is_constant: bool, value: Any) -> Any:
    """All that the code of a kernel depends on in one of its arguments."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    return (type(value), value) if is_constant or type(value) is int else type(value)


def _analysed(kernel: Any, given: _Given) -> frozenset[str] | None:
    """Asks torch."""
    home: Any = importlib.import_module("torch._higher_order_ops.triton_kernel_wrap")
    # Torch says that a kernel writes all tensors if it can't read it. The log alone tells; if somebody has switched the
    # log off, all tensors count as written, which is safe.
    with unprinted_failures(home.log) as failures:
        if hasattr(home, "identify_accessed_tensors"):
            accesses = home.identify_accessed_tensors(kernel, given, {})
            names = [dependency.name for dependency in accesses.read_writes.writes]
        elif hasattr(home, "identify_mutated_tensors"):
            names = home.identify_mutated_tensors(kernel, given, {})
        else:
            return None
    return None if failures else frozenset(names)


def _imported(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)
