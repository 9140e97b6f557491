"""Copies to try things on, and a world that is put back afterwards."""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from megatrain.device import HOST
from megatrain.errors import ExecuteError
from megatrain.tracer.python.holders import Attributes
from megatrain.tracer.python.outer import Outer
from megatrain.tracer.recording.random_numbers import kept_rng


@contextmanager
def left_alone(model: nn.Module) -> Generator[None]:
    """Puts back what the body changes around the model: the host's random generators, attributes, gradients.

    The body works on copies; what it can still reach are globals, and the model itself by way of a closure.

    Raises:
        ExecuteError: If a copy's step left gradients in `model` itself: then the copies aren't copies.
    """
    with ExitStack() as stack:
        # Parameters made in inference mode would count no versions.
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        stack.enter_context(kept_rng(HOST))
        stack.callback(Attributes(model, Outer.of(model)).restore)
        gradients = [(p, p.grad) for p in model.parameters()]
        stack.callback(_give_back, gradients)
        for parameter, _ in gradients:
            parameter.grad = None
        yield
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                raise ExecuteError(
                    f"a step of a copy of the model left a gradient in the model's own `{name}`.\n"
                    "  verify trains copies; a function that refers to the model itself, such as a replaced "
                    "`forward`, isn't copied with it.\n"
                    "  Bind such functions to modules, or build a model without them."
                )


def _give_back(gradients: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    for parameter, gradient in gradients:
        parameter.grad = gradient


def copied_model(model: nn.Module) -> nn.Module:
    """Returns a deep copy without gradients.

    Raises:
        ExecuteError: If the model can't be copied.
    """
    try:
        copied = copy.deepcopy(model)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise ExecuteError(
            f"the model can't be copied ({type(error).__name__}: {error}).\n"
            "  verify trains copies, so that the model itself stays as it is.\n"
            "  Its attributes must not hold objects that copy.deepcopy refuses: tensors with a history, locks, "
            "open files."
        ) from error
    copied.zero_grad(set_to_none=True)
    return copied


def copied_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies inputs as leaves of their own, strides included; one that stands twice is copied once."""
    copies: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if id(tensor) not in copies:
            copies[id(tensor)] = _copied(tensor.detach()).requires_grad_(tensor.requires_grad)
    return [copies[id(t)] for t in tensors]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.numel() == 0:
        return tensor.clone()
    # Only the elements that it spans: an input may be a small slice of a whole data set.
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride())
