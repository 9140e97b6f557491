"""Code of a trainer that calls the plain model, or parts of its model by themselves: those calls don't stream."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatrain.base.torch_private import DisableTorchFunctionSubclass
from megatrain.errors import ExecuteError
from megatrain.training.compiled.inside import Compiled
from megatrain.training.compiled.module import CompiledModule
from megatrain.training.compiled.walking import taken_by

_NOTE = (
    "megatrain keeps the model's parameters in host memory. A part of the model that is called by itself\n"
    "  (`model.lm_head(x)`) runs there. Call the whole model, or compute this in its forward."
)


def give_losses(losses: Any, compiled: CompiledModule) -> CompiledModule:
    """Gives the compiled model to modules of losses that hold the plain one (sentence-transformers' do).

    Args:
        losses: The trainer's: a module, several by name, or anything else, in which nothing is looked for.
        compiled: Takes the place of its plain model.

    Returns:
        What they hold now: an object with a `forward` of its own, which losses may replace.
    """
    given = _for_losses(compiled)
    for loss in losses.values() if isinstance(losses, dict) else [losses]:  # pyright: ignore[reportUnknownVariableType]
        for module in loss.modules() if isinstance(loss, nn.Module) else ():
            for name, child in list(module.named_children()):
                if child is compiled.megatrain.model and module is not child:
                    setattr(module, name, given)
    return given


def check_streams(model: nn.Module, compiled: CompiledModule) -> None:
    """Looks whether a trainer still trains the model that its constructor has compiled, or one around that.

    Raises:
        ExecuteError: If it trains another.
    """
    if model is not compiled and all(module is not compiled for module in model.modules()):
        raise ExecuteError(
            "the trainer's model isn't the one that streams: its `model` was set after it was made.\n"
            "  The constructor compiles the model that it is given. Another one would train without megatrain.\n"
            "  Give the constructor this model: make a trainer for it."
        )


def first_hooked(model: nn.Module) -> str | None:
    """The first parameter whose gradients a hook gets; a training step has one gradient for all micro-batches."""
    with DisableTorchFunctionSubclass():  # a question to a parameter whose update is due, which doesn't need the update
        for name, p in model.named_parameters():
            if p._backward_hooks or p._post_accumulate_grad_hooks:  # pyright: ignore
                return name
    return None


def streaming_code(compiled: Compiled, code: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Runs code that calls a model, and sees that it does.

    Raises:
        ExecuteError: If parameters get gradients, and the code didn't call the model.
    """
    count = 0

    def counted(called: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal count
        count += called is compiled
        return called(*args, **kwargs)

    before = gradients_of(compiled)
    with taken_by(counted):
        found = code()
    if not count:
        check_streamed(compiled, before)
    return found


def gradients_of(compiled: Compiled) -> dict[str, tuple[torch.Tensor, int]]:
    """The gradients that parameters have, and how often they were written."""
    found = {name: p.grad for name, p in compiled.model.named_parameters()}
    return {name: (grad, grad._version) for name, grad in found.items() if grad is not None}


def check_streamed(compiled: Compiled, before: dict[str, tuple[torch.Tensor, int]]) -> None:
    """Looks whether code that didn't call the model has differentiated parts of it.

    Raises:
        ExecuteError: If parameters have other gradients than before.
    """
    for name, (gradient, version) in gradients_of(compiled).items():
        known = before.get(name)
        if known is None or known[0] is not gradient or known[1] != version:
            raise ExecuteError(
                f"the loss gives `{name}` a gradient, and doesn't call the model.\n"
                "  Calls of the whole model stream. A part that is called by itself (`model.lm_head(x)`) runs on the\n"
                "  host, as without megatrain.\n"
                "  Call the model, with output_hidden_states=True for what is inside, or compute the loss in its\n"
                "  forward."
            )


def note_where_parts_run(error: RuntimeError) -> None:
    """Says where parameters are, to an error of torch about tensors on two devices."""
    if "same device" in str(error) or "is on cpu" in str(error):
        error.add_note(_NOTE)


# -- the model as losses hold it ---------------------------------------------------------------------------------------

# A loss such as sentence-transformers' MatryoshkaLoss puts an object in place of `model.forward`, which calls the
# former `forward` and keeps its results for the loss's next terms. On a compiled model a capture would run this object,
# and graphs can't keep tensors from one call to the next. Here it runs as in eager: around the calls that stream.


def _for_losses(compiled: CompiledModule) -> CompiledModule:
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
    """Whether a loss has put something in place of `forward` of what `give_losses` returned."""
    forward = vars(type(made)).get("forward")
    return isinstance(forward, _ForwardAround) and forward.around is not None


class _ForwardAround:
    """The attribute `forward` of such an object.

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
