"""Observer: a user's hook that only looks at tensors, and runs for real once in each forward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from megatrain.errors import ExecuteError
from megatrain.torch_private import FakeTensor, pytree
from megatrain.tracer.calls import call_name
from megatrain.tracer.python.names import Outer
from megatrain.tracer.python.snapshot import Snapshot
from megatrain.tracer.recording.obstacles import RUN_AGAIN, check_call, refuse

_here = threading.local()
_NO_MODULE = nn.Module()
# Calls that tie something to a tensor which outlives the hook, or change the tensor itself.
_TIES = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "backward"})


@contextmanager
def unobserved() -> Generator[None]:
    """Keeps observers quiet while a forward is repeated: in eager there is only one."""
    before = getattr(_here, "is_repeating", False)
    _here.is_repeating = True
    try:
        yield
    finally:
        _here.is_repeating = before


class Observer:
    """Calls a hook that returns nothing; the target of a graph node without a result.

    Args:
        name: Fully qualified name of the module that has the hook.
        module: That module.
        hook: The user's hook.
        args: What it is called with behind the module, positional and keyword arguments.
    """

    __name__ = "observer"

    def __init__(self, name: str, module: nn.Module, hook: Callable[..., Any], args: Any):
        self.name = name
        self._module = module
        self._hook = hook
        self._outer = Outer.of_hook(hook)
        leaves, self._tree = pytree.tree_flatten(args)
        self._is_tensor = [isinstance(x, torch.Tensor) for x in leaves]
        self._literals = [None if isinstance(x, torch.Tensor) else x for x in leaves]

    def call_text(self, arguments: str) -> str:
        """Prints the call on arguments that are printed already."""
        return f"hook of {self.name or 'the model'}({arguments})"

    def python_state(self) -> Snapshot:
        """What the hook may change, as it is now."""
        return Snapshot(_NO_MODULE, self._outer)

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Runs the hook, unless the forward is a repetition or tensors have no values.

        Raises:
            ExecuteError: If the hook does what an observer doesn't: return something, write into a tensor.
        """
        if getattr(_here, "is_repeating", False) or any(isinstance(t, FakeTensor) for t in tensors):
            return
        before = [t._version for t in tensors]
        result = self._called([_Observed.apply(t) if t.requires_grad else t for t in tensors])
        if result is not None:
            raise ExecuteError(_changes(self.name, "returns a value"))
        if [t._version for t in tensors] != before:
            raise ExecuteError(_changes(self.name, "writes into a tensor in place"))

    def first_run(self, tensors: Sequence[torch.Tensor], seen: Callable[[torch.Tensor], None]) -> None:
        """Runs the hook during a capture.

        Args:
            tensors: As for a call.
            seen: Called with each tensor that the hook is given or computes.

        Raises:
            Obstacle: If the hook does more than look.
        """
        given = [t.view_as(t) for t in tensors]
        for tensor in given:
            seen(tensor)
        with _Looking(seen):
            result = self._called(given)
        if result is not None:
            _refuse("returns a value")

    def _called(self, tensors: Sequence[Any]) -> Any:
        given = iter(tensors)
        leaves = [next(given) if t else x for t, x in zip(self._is_tensor, self._literals, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
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
