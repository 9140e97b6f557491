"""Two copies of a model, one eager, one compiled: whatever their calls and backwards leave behind must be equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

import megatrain
from megatrain.tracer.arguments import Structure
from tests.comparing import assert_same, assert_same_state, largest
from tests.host_updates import HostUpdates

PATHS: dict[str, dict[str, Any]] = {
    "bind": {"transfer": "bind", "activations": "recompute"},
    "recompute": {"transfer": "copy", "activations": "recompute"},
    "keep": {"transfer": "copy", "activations": "keep"},
    "offload": {"transfer": "copy", "activations": "offload", "block_bytes": 1},
}
"""Where weights lie and what is kept: each takes another path through the runtime."""

M = TypeVar("M", bound=nn.Module)
Drive = Callable[[Callable[..., Any], nn.Module], Any]


@dataclass
class Trained:
    """What a few training steps left behind."""

    outputs: list[list[torch.Tensor]]
    gradients: list[dict[str, torch.Tensor | None]]
    state: dict[str, torch.Tensor]
    rng: torch.Tensor
    input_gradients: list[list[torch.Tensor | None]]


def loss_of(result: Any) -> torch.Tensor | None:
    """One scalar that every differentiable output contributes to."""
    tensors = [t for t in Structure.of(result).placeholders if t.requires_grad]
    terms = [t.abs().mean() if t.is_complex() else (t.double() * 1.5).sin().mean().float() for t in tensors]
    return torch.stack(terms).sum() if terms else None


def train(
    call: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any, *, steps: int = 2, seed: int = 5
) -> Trained:
    """Trains `model` through `call` for `steps` steps of AdamW, whose updates run on the host."""
    trained = [p for p in model.parameters() if p.requires_grad]
    updates = HostUpdates(trained, lambda copies: torch.optim.AdamW(copies, lr=1e-2)) if trained else None
    found = Trained([], [], {}, torch.empty(0), [])
    inputs = [t for t in Structure.of((args, kwargs)).placeholders if t.requires_grad]
    torch.manual_seed(seed)
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        for tensor in inputs:
            tensor.grad = None
        result = call(*args, **kwargs)
        loss = loss_of(result)
        if loss is not None:
            loss.backward()
        found.outputs.append([t.detach().cpu().clone() for t in Structure.of(result).placeholders])
        found.gradients.append(
            {n: None if p.grad is None else p.grad.detach().cpu().clone() for n, p in model.named_parameters()}
        )
        found.input_gradients.append([None if t.grad is None else t.grad.detach().clone() for t in inputs])
        if updates is not None:
            updates.step()
    found.state = {k: v.detach().cpu().clone() for k, v in [*model.named_parameters(), *model.named_buffers()]}
    found.rng = torch.get_rng_state()
    return found


def assert_close(expected: Trained, found: Trained, tolerance: float, *, updates: bool = True) -> None:
    """`assert_same`, but for a tolerance, which is relative to the largest gradient, or to the largest of a tensor."""
    assert_same(expected.rng, found.rng, "random generator")
    assert_same(expected.outputs, found.outputs, "outputs", tolerance)
    for step, (gradients, others) in enumerate(zip(expected.gradients, found.gradients, strict=True)):
        assert_same(gradients, others, f"gradients of step {step}", tolerance, scale=largest(gradients))
    assert_same(expected.input_gradients, found.input_gradients, "gradients of inputs", tolerance)
    if updates:
        assert_same(expected.state, found.state, "state", tolerance)


def assert_parity(
    model: nn.Module, args: Any, kwargs: Any, *, tolerance: float = 0.0, steps: int = 2, **options: Any
) -> Any:
    """Trains two copies of `model`, one eager, one compiled with `options`; returns the compiled module."""
    eager, streamed = copy.deepcopy(model), copy.deepcopy(model)
    compiled = megatrain.compile(streamed, device="cpu", **options)
    expected = train(eager, eager, args, kwargs, steps=steps)
    found = train(compiled, streamed, args, kwargs, steps=steps)
    assert_close(expected, found, tolerance)
    return compiled


def seeded(build: Callable[[], M]) -> M:
    """Builds a model from a fixed seed; the caller's generator is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        return build()


def assert_parity_of(
    model: nn.Module, drive: Drive, *, seed: int = 3, **options: Any
) -> tuple[megatrain.CompiledModule, Any]:
    """Runs `drive(call, model)` on both copies and compares what it returns, gradients, state and random numbers.

    Args:
        model: Copied for each run.
        drive: Calls `call` as it likes; what it returns is compared tensor by tensor.
        seed: Of torch's generator, before each run.
        **options: Of `compile`; without any, the path "offload", on which all moves.

    Returns:
        The compiled module and what `drive` returned for it.
    """
    eager, streamed = copy.deepcopy(model), copy.deepcopy(model)
    compiled = megatrain.compile(streamed, device="cpu", **(options or PATHS["offload"]))
    torch.manual_seed(seed)
    expected = drive(eager, eager)
    end = torch.get_rng_state()
    torch.manual_seed(seed)
    found = drive(compiled, streamed)
    assert_same(end, torch.get_rng_state(), "random generator")
    assert_same(list(Structure.of(expected).placeholders), list(Structure.of(found).placeholders), "result")
    assert_same_state(eager, streamed)
    return compiled, found
