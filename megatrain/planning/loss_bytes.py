"""measure_loss(): the device memory that a training step's own loss takes, found out without any."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from types import (
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch
from torch import nn

from megatrain.base.interrupts import Interrupts
from megatrain.base.torch_private import pytree
from megatrain.device import Device
from megatrain.passes.interpret import exact_fakes
from megatrain.passes.kernels import LiveBytes
from megatrain.passes.program import Program
from megatrain.runtime.random_calls import kept_generators
from megatrain.tracer.python.names import codes_of
from megatrain.tracer.python.python_values import (
    BUFFERS,
    CONTAINERS,
    VALUES,
    Named,
    held_in,
    holders_in,
    identity_of,
    is_same,
    is_unchangeable,
    put_into,
)
from megatrain.tracer.source_line import OURS, file_of, is_library, package_of
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.traced import TracedModule

Loss = Callable[[Any, Any], torch.Tensor]
"""Makes a scalar of the model's result and the micro-batch."""
Cut = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""Brings the tensors that a capture returns to the lengths of the caller's batch; `list` if they have them."""
# Of a loss that can't be measured: results in fp32, their log-softmax, its gradient, and that of the results in fp32.
_COPIES = 4
_MOST = 50_000  # objects that a loss may reach
# What other callables and descriptors call.
_PARTS: dict[type, tuple[str, ...]] = {
    MethodType: ("__func__", "__self__"), functools.partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",), classmethod: ("__func__",), property: ("fget", "fset"),
}  # fmt: skip
_OPEN = (nn.Module, Enum, SimpleNamespace, MemberDescriptorType, GetSetDescriptorType)
_EFFECTS = ("print", "open", "input", "exec", "eval")
_HERE = sys._getframe().f_code  # of variables that no message names


def measure_loss(
    program: Program,
    traced: TracedModule,
    inputs: Sequence[torch.Tensor],
    batch: Any,
    cut: Cut,
    loss: Loss,
    device: Device,
) -> int:
    """Runs a loss and its backward on tensors without values, and leaves no trace of that.

    Returns:
        The most device bytes beyond the model's outputs and their gradients. If the loss doesn't run on such tensors
        (it reads a value, say), or what it changes can't be put back, those of four fp32 copies of the outputs.
    """
    reached = _Reached(loss)
    if not reached.is_known:
        return _bound(program)
    try:
        with (
            Interrupts(),  # an error that leaves a dispatch mode called from C++ ends the process
            kept_generators(device),
            exact_fakes(allow_non_fake_inputs=True) as mode,
            torch.autograd.set_detect_anomaly(False),
        ):
            given, fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (batch, list(inputs)))
            outputs = [_output(program, ref.kind, ref.name) for ref in program.outputs]
            results = [t for t in outputs if t.requires_grad]
            known = [t for t in pytree.tree_leaves((given, fakes, outputs)) if isinstance(t, torch.Tensor)]
            with torch.enable_grad(), LiveBytes(known, program.device) as live:
                found = loss(traced.result(cut(outputs), fakes), given)
                gradients: Any = torch.autograd.grad(found.reshape(()), results, allow_unused=True)
                made = sum(g.untyped_storage().nbytes() for g in gradients if g is not None)
        return max(0, live.peak - made)
    except Exception:  # the bound stands for any failure, and a real one comes again in the step
        return _bound(program)
    finally:
        reached.restore()


def _output(program: Program, kind: str, name: str) -> torch.Tensor:
    """A stand-in of an output; a loss may write into it, so it isn't a leaf."""
    value = program.values[name] if kind == "value" else None
    spec: TensorSpec = program.state[name].spec if value is None else value.spec
    strides = torch.empty(spec.shape, device="meta").stride() if spec.stride is None else spec.stride
    made = torch.empty_strided(spec.shape, strides, dtype=spec.dtype, device=program.device)
    return made.requires_grad_().clone() if value is not None and value.requires_grad else made


def _bound(program: Program) -> int:
    values = (program.values[ref.name] for ref in program.outputs if ref.kind == "value")
    return _COPIES * 4 * sum(value.spec.numel for value in values if value.requires_grad)


class _Reached:
    """All that a function may change: what its code names, and whatever that holds, as it is now.

    Functions of torch, of Python's library and of installed packages are taken to keep nothing. Objects of ours know
    tensors without values.

    Attributes:
        is_known: Everything can be put back. What iterators, generators, files and objects written in C hold can't.
    """

    def __init__(self, function: Any) -> None:
        self.is_known = True
        self._held: dict[Any, tuple[Any, dict[Any, Any]]] = {}
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        met: dict[int, Any] = {}  # alive, so that identities stay their own
        stack = [function]
        while stack and self.is_known:
            value = stack.pop()
            if id(value) not in met and not isinstance(value, VALUES):
                met[id(value)] = value
                stack += self._inside(value)
                self.is_known &= len(met) <= _MOST

    def restore(self) -> None:
        """Puts everything back."""
        for holder, content in self._held.values():
            now = held_in(holder)
            if not is_same(holder, content, now):
                put_into(holder, content, [label for label in now if label not in content])
        for tensor, gradient in self._gradients:
            tensor.grad = gradient

    def _inside(self, value: Any) -> Iterable[Any]:
        """What a value holds, or what may run when it is called."""
        if isinstance(value, torch.Tensor):
            self._gradients += [(value, value.grad)] if value.is_leaf else []
            return ()
        if isinstance(value, FunctionType | ModuleType | type):
            return self._of_code(value) if _is_users(value) else ()
        names = next((names for kind, names in _PARTS.items() if isinstance(value, kind)), None)
        return self._of_object(value) if names is None else [getattr(value, name) for name in names]

    def _of_code(self, value: FunctionType | ModuleType | type) -> Iterable[Any]:
        if isinstance(value, FunctionType):
            return self._named(value)
        if isinstance(value, ModuleType):
            return self._content(vars(value))
        return [each for name in vars(value) for each in self._variable(value, name)]

    def _named(self, function: FunctionType) -> Iterable[Any]:
        codes = codes_of(function.__code__)
        names = {name for code in codes for name in code.co_names}
        self.is_known &= not any(name in _EFFECTS and name not in function.__globals__ for name in names)
        found = [each for name in names for each in self._variable(function.__globals__, name)]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            found += self._variable(cell, name)
        return *found, vars(function), function.__defaults__, function.__kwdefaults__

    def _variable(self, holder: Any, name: str) -> Iterable[Any]:
        """What is held there; a name that begins with two underscores is Python's own, unless it is a method."""
        variable = Named(name, holder, name, _HERE)
        value = variable.now()
        if name.startswith("__") and not isinstance(value, FunctionType):
            return ()
        return self._content(variable)

    def _content(self, holder: Any) -> Iterable[Any]:
        content = held_in(holder)
        if not is_unchangeable(holder):
            self._held[identity_of(holder)] = holder, content
        return () if isinstance(holder, BUFFERS) else content.values()

    def _of_object(self, value: Any) -> Iterable[Any]:
        kind = type(value)
        if isinstance(value, tuple | frozenset) or file_of(kind).startswith(OURS):
            return value if isinstance(value, tuple | frozenset) else ()
        holders = [vars(value)] if isinstance(value, nn.Module) else holders_in(value)
        is_container = isinstance(value, (*CONTAINERS, *BUFFERS))
        if is_container:
            self.is_known &= any(holder is value for holder in holders)  # not if it is large
        elif not isinstance(value, _OPEN) and not callable(value) and kind is not object:
            # What is written in C may hold what can't be seen, unless it has a hash of its own.
            has_own_hash = kind.__hash__ not in (None, object.__hash__)
            self.is_known &= has_own_hash or (kind.__new__ is object.__new__ and bool(holders))
        return [kind, *(each for holder in holders for each in self._content(holder))]


def _is_users(code: FunctionType | ModuleType | type) -> bool:
    """Tells whether code is the user's own, rather than that of Python, of an installed package, or ours."""
    if isinstance(code, type):
        file = file_of(code)
    else:
        file = code.__code__.co_filename if isinstance(code, FunctionType) else getattr(code, "__file__", None) or "<"
    return not is_library(file) and package_of(file) is None and not file.startswith(OURS) and file != "<"
