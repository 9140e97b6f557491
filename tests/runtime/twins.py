"""Two copies of a model, one eager, one compiled, driven by the same code; whatever they leave behind must be equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

import megatrain
from megatrain.tracer.arguments import Structure

MODES: dict[str, dict[str, Any]] = {
    "bind": {"transfer": "bind", "activations": "recompute"},
    "recompute": {"transfer": "copy", "activations": "recompute"},
    "keep": {"transfer": "copy", "activations": "keep"},
    "offload": {"transfer": "copy", "activations": "offload", "block_bytes": 1},
}
"""Where weights lie and what is kept: each takes another path through the runtime."""

M = TypeVar("M", bound=nn.Module)
Drive = Callable[[Callable[..., Any], nn.Module], Any]


def seeded(build: Callable[[], M]) -> M:
    """Builds a model from a fixed seed; the caller's generator is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        return build()


def assert_same_tensor(left: Any, right: Any, what: str) -> None:
    """Asserts equality bit for bit, of values, dtype, shape and layout; None equals None, NaN equals NaN."""
    if left is None or right is None:
        assert left is right, f"{what}: {left} against {right}"
        return
    assert left.layout == right.layout, what
    assert (left.shape, left.dtype, left.requires_grad) == (right.shape, right.dtype, right.requires_grad), what
    if left.is_sparse:
        left, right = left.to_dense(), right.to_dense()
    assert torch.equal(left.detach().nan_to_num(), right.detach().nan_to_num()), f"{what}: {left} against {right}"
    if left.is_floating_point():
        assert torch.equal(left.isnan(), right.isnan()), what


def assert_twins(
    model: nn.Module, drive: Drive, *, seed: int = 3, **options: Any
) -> tuple[megatrain.CompiledModule, Any]:
    """Runs `drive(call, model)` on both copies and compares what it returns, gradients, state and random numbers.

    Args:
        model: Copied for each run.
        drive: Calls `call` as it likes; what it returns is compared tensor by tensor.
        seed: Of torch's generator, before each run.
        **options: Of `compile`.

    Returns:
        The compiled module and what `drive` returned for it.
    """
    eager, streamed = copy.deepcopy(model), copy.deepcopy(model)
    compiled = megatrain.compile(streamed, device="cpu", **options)
    torch.manual_seed(seed)
    expected = drive(eager, eager)
    end = torch.get_rng_state()
    torch.manual_seed(seed)
    found = drive(compiled, streamed)
    assert torch.equal(end, torch.get_rng_state()), "the random generator ended elsewhere"
    left, right = Structure.of(expected), Structure.of(found)
    assert len(left.placeholders) == len(right.placeholders)
    for index, (a, b) in enumerate(zip(left.placeholders, right.placeholders, strict=True)):
        assert_same_tensor(a, b, f"result {index}")
    assert_same_state(eager, streamed)
    return compiled, found


def assert_same_state(eager: nn.Module, other: nn.Module) -> None:
    """Asserts that parameters, their gradients, and buffers are equal bit for bit."""
    others = dict(other.named_parameters())
    for name, parameter in eager.named_parameters():
        assert_same_tensor(parameter, others[name], name)
        assert_same_tensor(parameter.grad, others[name].grad, f"gradient of {name}")
        if parameter.grad is not None and parameter.grad.layout == torch.strided:
            assert parameter.grad.stride() == others[name].grad.stride(), f"strides of the gradient of {name}"
    buffers = dict(other.named_buffers())
    for name, buffer in eager.named_buffers():
        assert_same_tensor(buffer, buffers[name], name)
