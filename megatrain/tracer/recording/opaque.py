"""Opaque: a module whose own code runs at each step, because no graph can stand for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from megatrain.errors import TraceError
from megatrain.interrupts import Interrupts
from megatrain.torch_private import are_transforms_active, pytree
from megatrain.tracer.arguments import Structure, holds_tensors
from megatrain.tracer.guards import GuardFailedError
from megatrain.tracer.inventory import with_own_history
from megatrain.tracer.python.names import Outer
from megatrain.tracer.python.snapshot import Keeper, Kept, Snapshot
from megatrain.tracer.recording.effect_watch import ByteCount, has_users_hooks
from megatrain.tracer.recording.obstacles import HookSite, check_everywhere
from megatrain.tracer.source_line import own_code

# With the latter a module gets to the nodes of autograd's graph, which have hooks too.
_HOOK_BACKWARD = (torch.Tensor.register_hook, torch.Tensor.grad_fn.__get__)  # pyright: ignore

Holder = tuple[nn.Module, str, str]
"""A module, which of its registries (`_parameters` or `_buffers`), and a name in it."""


class Opaque:
    """Calls a module on tensors that stand for its arguments and its state; the target of a graph node.

    Args:
        name: Fully qualified name of the module.
        reason: Why it can't be captured, with the user's line.
        module: The user's module.
        args: Positional and keyword arguments of the call at capture.
        holders: Per state tensor, in order: every place in the module that holds it.
        calls: The module calls around it and itself, outermost first.
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
        leaves, self._tree = pytree.tree_flatten(args)
        self._is_tensor = [isinstance(x, torch.Tensor) for x in leaves]
        self._literals = [None if isinstance(x, torch.Tensor) else x for x in leaves]
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
        is_alike = len(leaves) == len(self._expected) and all(map(_is_as_kept, self._expected, leaves))
        if rebound != self._rebound or not is_alike:
            text = f"{self.call_text('...')} returns {_listed(self._expected)}"
            raise GuardFailedError(text, _listed(_kept_leaves(result)), self._calls)
        return tuple(found)

    def capture(
        self, tensors: Sequence[torch.Tensor], more: dict[int, torch.Tensor], seen: Callable[[torch.Tensor], None]
    ) -> tuple[tuple[torch.Tensor, ...], Any, list[tuple[Holder, torch.Tensor]]]:
        """Runs the module for the first time and notes what its result looks like.

        Args:
            tensors: As for a call.
            more: Further stand-ins, by the id of what they replace.
            seen: Called with each tensor that the module's own code computes.

        Returns:
            The tensors as from a call, the module's result around them, and the buffers that it re-assigned.
        """
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
        num_arguments = sum(self._is_tensor)
        given = iter(tensors[:num_arguments])
        leaves = [next(given) if t else x for t, x in zip(self._is_tensor, self._literals, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        state = tensors[num_arguments:]
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
    """Frees what autograd saved while the module ran: it may be as large as all that the module computed.

    Args:
        result: What the module returned.
        results: The tensors that its node gives.
        operands: What the module was given: it may return such a tensor.
        refuse: Called by a backward that gets to the module; raises.

    Returns:
        `result` and `results`; tensors that the module's code gave a history have another.
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


def _is_as_kept(kept: Kept, leaf: Any) -> bool:
    return kept.difference(leaf) is None


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


class Escapes:
    """Remembers, weakly, what opaque modules and observers computed inside: such a tensor may not appear outside."""

    def __init__(self) -> None:
        self._origins: dict[int, tuple[weakref.ref[torch.Tensor], tuple[tuple[str, ...], frozenset[HookSite]]]] = {}

    def note(self, tensor: torch.Tensor, calls: tuple[str, ...], hooks: frozenset[HookSite] = frozenset()) -> None:
        """Notes a tensor made while the model was in `calls`, by one of `hooks` if there are any."""
        self._origins[id(tensor)] = (weakref.ref(tensor), (calls, hooks))

    def origin(self, tensor: torch.Tensor) -> tuple[tuple[str, ...], frozenset[HookSite]] | None:
        """Returns the module calls and the hooks in which a tensor was made; None if it was made elsewhere."""
        reference, origin = self._origins.get(id(tensor), (None, None))
        return origin if reference is not None and reference() is tensor else None
