"""Code of a trainer that calls the plain model, or parts of its model by themselves: those calls don't stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatrain.compiled.inside import Compiled, taken_by
from megatrain.compiled.module import CompiledModule
from megatrain.errors import ExecuteError
from megatrain.integrations.hf.for_losses import for_losses
from megatrain.torch_private import DisableTorchFunctionSubclass

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
        What they hold now; see `for_losses`.
    """
    given = for_losses(compiled)
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
