"""for_losses(): the compiled model as the modules of losses hold it, whose `forward` they may replace for a while.

A loss such as sentence-transformers' MatryoshkaLoss puts an object in place of `model.forward`, which calls the former
`forward` and keeps its results for the loss's next terms. On a compiled model a capture would run this object, and
graphs can't keep tensors from one call to the next. Here it runs as in eager: around the calls that stream.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from megatrain.compiled.module import CompiledModule


def for_losses(compiled: CompiledModule) -> CompiledModule:
    """Returns an object that has all of a compiled model, equals it, and has a `forward` of its own."""
    forward = _ForwardAround(compiled)

    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs) if forward.around is None else forward.around(*args, **kwargs)

    content: dict[str, Any] = {
        "__slots__": (),
        "__module__": type(compiled).__module__,
        "__qualname__": type(compiled).__qualname__,
        "__call__": call,
        "__eq__": lambda _, other: isinstance(other, CompiledModule) and other.megatrain is compiled.megatrain,
        "__hash__": lambda _: hash(compiled),
        "forward": forward,
    }
    kind = types.new_class(type(compiled).__name__, (type(compiled),), exec_body=lambda body: body.update(content))
    made: Any = object.__new__(kind)
    for name in ("__dict__", *CompiledModule.__slots__):
        object.__setattr__(made, name, getattr(compiled, name))
    return made


def has_forward_replaced(made: CompiledModule) -> bool:
    """Whether a loss has put something in place of `forward` of what `for_losses` made."""
    forward = vars(type(made)).get("forward")
    return isinstance(forward, _ForwardAround) and forward.around is not None


class _ForwardAround:
    """The attribute `forward` of such an object.

    Args:
        compiled: The model.

    Attributes:
        around: What a loss has put in its place; None if nothing has.
    """

    def __init__(self, compiled: CompiledModule) -> None:
        self.around: Callable[..., Any] | None = None
        self._compiled = compiled

    def __get__(self, instance: Any, owner: type) -> Any:
        return self._compiled.forward if self.around is None else self.around

    def __set__(self, instance: Any, value: Any) -> None:
        is_former = isinstance(value, types.MethodType) and value.__self__ is self._compiled
        self.around = None if is_former else value

    def __delete__(self, instance: Any) -> None:
        if self.around is None:
            raise AttributeError("forward")
        self.around = None
