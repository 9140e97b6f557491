"""Runs a model eagerly and compiled, side by side, and compares all that a training step produces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import megatrain
from megatrain.tracer.arguments import Structure


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
    """Trains `model` through `call` for `steps` steps of AdamW."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2) if trained else None
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
        if optimizer is not None:
            optimizer.step()
    found.state = {k: v.detach().cpu().clone() for k, v in [*model.named_parameters(), *model.named_buffers()]}
    found.rng = torch.get_rng_state()
    return found


def assert_same(expected: Trained, found: Trained, tolerance: float = 0.0, *, updates: bool = True) -> None:
    """Asserts equality of outputs, gradients, state and generator; `tolerance` is relative to the largest of a kind."""
    assert torch.equal(expected.rng, found.rng), "the random generator ended elsewhere"
    for step, (left, right) in enumerate(zip(expected.outputs, found.outputs, strict=True)):
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            _assert_close(a, b, tolerance, f"output {index} of step {step}")
    for step, (grads, others) in enumerate(zip(expected.gradients, found.gradients, strict=True)):
        assert grads.keys() == others.keys()
        scale = max((float(g.abs().max()) for g in grads.values() if g is not None and g.numel()), default=0.0)
        for name, gradient in grads.items():
            _assert_close(gradient, others[name], tolerance, f"gradient of {name} in step {step}", scale)
    for left, right in zip(expected.input_gradients, found.input_gradients, strict=True):
        for a, b in zip(left, right, strict=True):
            _assert_close(a, b, tolerance, "gradient of an input")
    for name, tensor in expected.state.items() if updates else ():
        _assert_close(tensor, found.state[name], tolerance, f"state {name}")


def _assert_close(
    a: torch.Tensor | None, b: torch.Tensor | None, tolerance: float, what: str, scale: float | None = None
) -> None:
    assert (a is None) == (b is None), f"{what}: {a} against {b}"
    if a is None or b is None:
        return
    assert (a.shape, a.dtype) == (b.shape, b.dtype), what
    if torch.equal(a, b) or (a.isnan().any() and torch.equal(a.nan_to_num(), b.nan_to_num())):
        return
    gap = float((a.double() - b.double()).abs().max())
    size = float(a.abs().max()) if scale is None else scale
    assert gap <= tolerance * size, f"{what}: differs by {gap:.3e} of {size:.3e}"


def assert_parity(
    model: nn.Module, args: Any, kwargs: Any, *, tolerance: float = 0.0, steps: int = 2, **options: Any
) -> Any:
    """Trains two copies of `model`, one eager, one compiled with `options`; returns the compiled module."""
    eager, streamed = copy.deepcopy(model), copy.deepcopy(model)
    compiled = megatrain.compile(streamed, device="cpu", **options)
    expected = train(eager, eager, args, kwargs, steps=steps)
    found = train(compiled, streamed, args, kwargs, steps=steps)
    assert_same(expected, found, tolerance)
    return compiled
