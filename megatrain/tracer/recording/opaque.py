"""Code of the user's that runs again at each step: modules that no graph can stand for, and hooks that only look."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from types import BuiltinFunctionType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from megatrain.base.interrupts import Interrupts
from megatrain.base.torch_private import FakeTensor, are_transforms_active, disable_current_modes, pytree
from megatrain.device import used_device
from megatrain.errors import ExecuteError, TraceError
from megatrain.tracer.arguments import Structure, holds_tensors
from megatrain.tracer.calls import call_name
from megatrain.tracer.guards import GuardFailedError
from megatrain.tracer.inventory import with_own_history
from megatrain.tracer.python.names import Outer
from megatrain.tracer.python.python_values import VALUES, GeneratorState
from megatrain.tracer.python.snapshot import Keeper, Kept, Snapshot
from megatrain.tracer.recording.effect_watch import ByteCount, has_users_hooks
from megatrain.tracer.recording.obstacles import (
    RUN_AGAIN,
    Obstacle,
    check_call,
    check_everywhere,
    refuse,
    refuse_flag,
)
from megatrain.tracer.recording.random_numbers import kept_rng
from megatrain.tracer.source_line import own_code, user_line

# With the latter a module gets to the nodes of autograd's graph, which have hooks too.
_HOOK_BACKWARD = (torch.Tensor.register_hook, torch.Tensor.grad_fn.__get__)  # pyright: ignore
# Calls of a hook that tie something to a tensor which outlives the hook, or change the tensor itself.
_TIES = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "backward"})
# Arguments that are at each step what they were at the capture, whatever the module does with them.
_LASTING = (*VALUES, torch.Size, np.generic, Enum, type, BuiltinFunctionType)

Holder = tuple[nn.Module, str, str]
"""A module, which of its registries (`_parameters` or `_buffers`), and a name in it."""


class CallForm:
    """Nested arguments of a call without their tensors."""

    def __init__(self, args: Any) -> None:
        leaves, self._tree = pytree.tree_flatten(args)
        self._is_tensor = [isinstance(x, torch.Tensor) for x in leaves]
        self._literals = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        self.num_tensors = sum(self._is_tensor)

    def filled(self, tensors: Iterator[Any]) -> Any:
        """Returns the arguments with the next tensors in place of those that they had."""
        leaves = [next(tensors) if t else x for t, x in zip(self._is_tensor, self._literals, strict=True)]
        return pytree.tree_unflatten(leaves, self._tree)


class Opaque:
    """Calls a module on tensors that stand for its arguments and its state; the target of a graph node.

    Args:
        reason: Why it can't be captured, with the user's line.
        holders: Per state tensor, in order: every place in the module that holds it.
    """

    __name__ = "opaque"

    def __init__(
        self,
        name: str,
        reason: str,
        module: nn.Module,
        args: tuple[tuple[Any, ...], dict[str, Any]],
        holders: Sequence[Sequence[Holder]],
        calls: tuple[str, ...],
    ):
        self.name = name
        self.reason = reason
        self.module = module
        # Read off the first run: transforms, TorchScript and the user's hooks keep weights where no hook of ours sees
        # them.
        self.needs_own_state = False
        self.runs_in_backward = False  # hooks of the user's, which may look at anything
        self.inner_bytes = 0
        self._calls = calls
        self._form = CallForm(args)
        self._holders = holders
        self._rebound: list[int] | None = None
        self._expected: list[Kept] = []
        self._outer = Outer.of(module)

    def call_text(self, arguments: str) -> str:
        """Prints the call on arguments that are printed already."""
        return f"opaque {self.name or 'the model'}({arguments})"

    def python_state(self) -> Snapshot:
        """What the module's code may change, as it is now."""
        return Snapshot(self.module, self._outer)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the module.

        Args:
            tensors: Those among the arguments, then the state.

        Returns:
            The tensors of the result, then the new values of buffers that the module re-assigned.

        Raises:
            GuardFailedError: If the result isn't like that of the capture: other shapes, another plain value.
        """
        found, rebound, result = self._run(tensors, {}, None)
        leaves = pytree.tree_leaves(result)
        is_alike = len(leaves) == len(self._expected) and all(
            kept.difference(leaf) is None for kept, leaf in zip(self._expected, leaves, strict=True)
        )
        if rebound != self._rebound or not is_alike:
            text = f"{self.call_text('...')} returns {_listed(self._expected)}"
            raise GuardFailedError(text, _listed(_kept_leaves(result)), self._calls)
        return tuple(found)

    def capture(
        self, tensors: Sequence[torch.Tensor], more: dict[int, torch.Tensor], seen: Callable[[torch.Tensor], None]
    ) -> tuple[tuple[torch.Tensor, ...], Any, list[tuple[Holder, torch.Tensor]]]:
        """Runs the module for the first time, and notes what its result looks like; see `OpaqueCall.run`."""
        found, self._rebound, result = self._run(tensors, more, seen)
        self._expected = _kept_leaves(result)
        num_results = len(found) - len(self._rebound)
        places = [holder for i in self._rebound for holder in self._holders[i][:1]]
        return tuple(found), result, list(zip(places, found[num_results:], strict=True))

    def _run(
        self,
        tensors: Sequence[torch.Tensor],
        more: dict[int, torch.Tensor],
        seen: Callable[[torch.Tensor], None] | None,
    ) -> tuple[list[torch.Tensor], list[int], Any]:
        args, kwargs = self._form.filled(iter(tensors))
        state = tensors[self._form.num_tensors :]
        with (
            Interrupts() as interrupts,
            _installed(self._holders, state) as stand_ins,
            _Substitution({**more, **stand_ins}, seen) as calls,
        ):
            with ByteCount(lambda: calls.is_calling) if seen is not None else nullcontext() as count:
                with own_code(), interrupts.released():
                    result = self.module(*args, **kwargs)
            now = [self._held(i) for i in range(len(state))]
        if count is not None:
            self.inner_bytes = count.nbytes
            self.needs_own_state = calls.hides_state or count.has_stray
            self.runs_in_backward = calls.hooks_backward or any(
                child._backward_hooks or child._backward_pre_hooks for child in self.module.modules()
            )
        rebound = [i for i, tensor in enumerate(state) if now[i] is not tensor]
        for _, kind, name in (self._holders[i][0] for i in rebound):
            if kind == "_parameters":
                raise TraceError(
                    f"the forward of `{self.name or 'the model'}` takes its parameter `{name}` out of a module.\n"
                    "  The parameter stays in host memory; the module has a stand-in until its call ends.\n"
                    "  Change what modules register (torch.nn.utils.parametrize) before the first call, or put the\n"
                    "  parameter back in the same forward."
                )
        found = tensors_in(result)
        return [*found, *(now[i] for i in rebound)], rebound, result

    def _held(self, index: int) -> Any:
        module, kind, name = self._holders[index][0]
        return vars(module)[kind].get(name)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Lists the tensors in a nested result, in a fixed order."""
    leaves = pytree.tree_leaves(value)
    if any(not isinstance(x, torch.Tensor) and holds_tensors(x) for x in leaves):
        return list(Structure.of(value).placeholders)
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def without_history(
    result: Any, results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor], refuse: Callable[[], NoReturn]
) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Frees what autograd saved while a module ran: it may be as large as all that the module computed.

    Args:
        results: The tensors that its node gives.
        operands: What the module was given: it may return such a tensor.
    """
    given = {id(tensor) for tensor in operands}
    made = {id(t): t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.grad_fn is not None}
    cut = {key: with_own_history(t.detach(), refuse) for key, t in made.items() if key not in given}
    result = pytree.tree_map_only(torch.Tensor, lambda t: cut.get(id(t), t), result)
    return result, tuple(cut.get(id(t), t) for t in results)


def _kept_leaves(result: Any) -> list[Kept]:
    """Records what code after the call can tell of its result: it must be the same at each step."""
    keeper = Keeper()
    return [keeper.keep(leaf) for leaf in pytree.tree_leaves(result)]


def _listed(kept: list[Kept]) -> str:
    return ", ".join(str(leaf).removeprefix("== ").removeprefix("is ") for leaf in kept) or "nothing"


@contextmanager
def _installed(
    holders: Sequence[Sequence[Holder]], state: Sequence[torch.Tensor]
) -> Generator[dict[int, torch.Tensor]]:
    """Puts `state` where the module looks for it; yields it by the id of the tensors that it replaces."""
    before = [[vars(module)[kind][name] for module, kind, name in places] for places in holders]
    try:
        for places, tensor in zip(holders, state, strict=True):
            for module, kind, name in places:
                if kind == "_parameters":
                    # The module's code may ask: `isinstance(tensor, nn.Parameter)`.
                    tensor._is_param = True  # pyright: ignore[reportAttributeAccessIssue]
                vars(module)[kind][name] = tensor
        yield {id(old): t for olds, t in zip(before, state, strict=True) for old in olds}
    finally:
        for places, olds in zip(holders, before, strict=True):
            for (module, kind, name), old in zip(places, olds, strict=True):
                vars(module)[kind][name] = old


class _Substitution(TorchFunctionMode):
    """Replaces tensors by their stand-ins in every call, whatever road they took there (a list of flat weights)."""

    def __init__(self, stand_ins: dict[int, torch.Tensor], seen: Callable[[torch.Tensor], None] | None):
        super().__init__()
        self._stand_ins = stand_ins
        self._seen = seen
        self.is_calling = False
        self.hides_state = self.hooks_backward = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        check_everywhere(func, kwargs)
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: self._stand_ins.get(id(t), t), (args, kwargs))
        if self._seen is None:
            return func(*args, **kwargs)
        is_transformed = are_transforms_active()
        self.hides_state |= is_transformed or has_users_hooks()
        self.hooks_backward |= func in _HOOK_BACKWARD
        self.is_calling = True
        result = func(*args, **kwargs)
        self.is_calling = False
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._seen(leaf)
        return result


class OpaqueCall:
    """One call of an opaque module during a capture; the arguments are those of `Opaque`, the module holds fake state.

    Attributes:
        has_drawn: Whether its run moved a random generator: torch's on the CPU, Python's, NumPy's, or one of its own.
    """

    def __init__(self, name: str, reason: str, module: nn.Module, args: Any, kwargs: Any, calls: tuple[str, ...]):
        self._name = name
        self._place = f"`{name}`" if name else "the model"
        self._calls = calls
        self._arguments = (args, kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        strange = [x for x in leaves if not isinstance(x, (torch.Tensor, *_LASTING))]
        if strange:
            self._refuse(f"is given a {type(strange[0]).__qualname__}, which may contain tensors or change")
        state = _state_of(module)
        self._num_state = len(state)
        self.operands = [*(x for x in leaves if isinstance(x, torch.Tensor)), *(tensor for tensor, _ in state)]
        self.opaque = Opaque(name, reason, module, (args, kwargs), [places for _, places in state], calls)
        self._attributes = self.opaque.python_state()
        self.changed: set[tuple[Any, Any]] = set()
        self.has_drawn = False

    def run(
        self, tensors: Sequence[torch.Tensor], more: Mapping[int, torch.Tensor], seen: Callable[[torch.Tensor], None]
    ) -> tuple[Any, tuple[torch.Tensor, ...], list[tuple[Holder, torch.Tensor]]]:
        """Runs the module.

        Args:
            tensors: Stand-ins for the operands.
            more: Further stand-ins, by the id of what they replace.
            seen: Called with each tensor that the module's own code computes.

        Returns:
            The module's result, the tensors that its node gives, and the buffers that it re-assigned.
        """
        memory = [_memory(t) for t in tensors]
        state = tensors[len(tensors) - self._num_state :]
        flags = [t.requires_grad for t in state]
        before = pytree.tree_flatten(self._arguments)
        cpu = _cpu_state()
        with kept_rng(used_device(tensors)) as moved:
            results, result, rebound = self.opaque.capture(tensors, dict(more), seen)
            self.has_drawn = cpu != _cpu_state()
        self.has_drawn |= bool(moved)
        after = pytree.tree_flatten(self._arguments)
        if before[1] != after[1] or any(a is not b for a, b in zip(before[0], after[0], strict=True)):
            self._refuse("changes a container that it is given")
        for change in self._attributes.changes():
            self.changed.add(change.where)
            self.has_drawn |= isinstance(change.holder, GeneratorState)
            if any(t.requires_grad for t in tensors_in(change.now)):
                self._refuse(f"keeps a tensor with a history in the attribute `{change.name}`")
        if any(now != then for now, then in zip(map(_memory, tensors), memory, strict=True)):
            raise Obstacle(
                f"gives a parameter other memory in the forward of {self._place}",
                "The parameter stays in host memory; the module gets a stand-in.",
                "Change parameters outside the forward.",
            )
        if [t.requires_grad for t in state] != flags:
            refuse_flag(f" in the forward of {self._place}")
        if any(t.is_leaf and t.grad is not None for t in tensors):
            raise Obstacle(
                f"runs a backward in the forward of {self._place}",
                "The gradients that this backward leaves in `.grad` would be lost.",
                "Use torch.autograd.grad, or run the backward outside the model.",
            )
        return result, results, rebound

    def _refuse(self, what: str) -> None:
        raise Obstacle(
            f"runs the module `{self._name}` again at each step, which {what},",
            "All tensors that enter or leave such a module must be in its arguments or its result.",
            "Pass and return tensors.",
            remedy=RUN_AGAIN,
            place=user_line(),
            calls=self._calls,
        )


def _cpu_state() -> bytes:
    """The state of torch's generator on the CPU."""
    with disable_current_modes():
        return torch.get_rng_state().numpy().tobytes()


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _state_of(module: nn.Module) -> list[tuple[torch.Tensor, list[Holder]]]:
    """Lists the state of a module with every place that holds it, tied tensors once."""
    found: dict[int, tuple[torch.Tensor, list[Holder]]] = {}
    for child in module.modules():
        for kind in ("_parameters", "_buffers"):
            for name, tensor in vars(child)[kind].items():
                if tensor is not None:
                    found.setdefault(id(tensor), (tensor, []))[1].append((child, kind, name))
    return list(found.values())


_repeating = threading.local()


@contextmanager
def unobserved() -> Generator[None]:
    """Keeps observers quiet while a forward is repeated: in eager there is only one."""
    before = getattr(_repeating, "is_repeating", False)
    _repeating.is_repeating = True
    try:
        yield
    finally:
        _repeating.is_repeating = before


class Observer:
    """Calls a hook that returns nothing; the target of a graph node without a result."""

    __name__ = "observer"

    def __init__(self, name: str, module: nn.Module, hook: Callable[..., Any], args: Any):
        self.name = name
        self._module = module
        self._hook = hook
        self._outer = Outer.of_hook(hook)
        self._form = CallForm(args)

    def call_text(self, arguments: str) -> str:
        """Prints the call on arguments that are printed already."""
        return f"hook of {self.name or 'the model'}({arguments})"

    def python_state(self) -> Snapshot:
        """What the hook may change, as it is now."""
        return Snapshot(nn.Module(), self._outer)

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Runs the hook, unless the forward is a repetition or tensors have no values.

        Raises:
            ExecuteError: If the hook does what an observer doesn't: return something, write into a tensor.
        """
        if getattr(_repeating, "is_repeating", False) or any(isinstance(t, FakeTensor) for t in tensors):
            return
        before = [t._version for t in tensors]
        result = self._called([_Observed.apply(t) if t.requires_grad else t for t in tensors])
        if result is not None:
            raise ExecuteError(_changes(self.name, "returns a value"))
        if [t._version for t in tensors] != before:
            raise ExecuteError(_changes(self.name, "writes into a tensor in place"))

    def first_run(self, tensors: Sequence[torch.Tensor], seen: Callable[[torch.Tensor], None]) -> None:
        """Runs the hook during a capture."""
        given = [t.view_as(t) for t in tensors]
        for tensor in given:
            seen(tensor)
        with _Looking(seen):
            result = self._called(given)
        if result is not None:
            _refuse("returns a value")

    def _called(self, tensors: Sequence[Any]) -> Any:
        args, kwargs = self._form.filled(iter(tensors))
        return self._hook(self._module, *args, **kwargs)


class _Observed(torch.autograd.Function):
    """What a hook sees of a tensor with a history: the same values, and no way to differentiate through them."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ExecuteError(
            "a backward reached a tensor that a forward hook has kept.\n"
            "  In the capture, the hook kept no tensor that requires a gradient, so the hook runs outside the graph.\n"
            "  Detach the tensors that the hook keeps, or let it keep tensors with a gradient at every call."
        )


class _Looking(TorchFunctionMode):
    """Follows what a hook calls during a capture."""

    def __init__(self, seen: Callable[[torch.Tensor], None]):
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        check_call(func, args, kwargs)
        if call_name(func) in _TIES:
            _refuse(f"calls `{call_name(func)}`")
        result = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._seen(leaf)
        return result


def _refuse(what: str) -> NoReturn:
    refuse(f"has a forward hook that {what}", "Such a hook is part of the graph.", "Only look.", remedy=RUN_AGAIN)


def _changes(name: str, what: str) -> str:
    return (
        f"a forward hook of `{name or 'the model'}` {what}, but didn't when the model was captured.\n"
        "  A hook that changes only its own Python state runs outside the graph, and can't change the graph's "
        "tensors.\n"
        "  Let the hook do the same at every call, or do it in the module's forward."
    )
