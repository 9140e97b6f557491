"""Gradients leave the device with the strides of their parameters: a transfer never has to copy them there first."""

from __future__ import annotations

import copy

import torch
from torch import nn

import megatrain
from megatrain.passes.pipeline import lower
from megatrain.tracer.trace import trace
from tests.extending.test_device import Toy


class Transposing(nn.Module):
    """The gradient of `w` comes transposed."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(4, 2, width, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,oxi->bxo", x, self.w).sum()


class Watching(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.strides: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        self.strides.append((source.stride(), out.stride()))
        return super().copy(out, source)


def test_gradients_leave_with_the_strides_of_their_parameters():
    model, toy, x = Transposing(), Watching(), torch.randn(5, 3)
    eager = copy.deepcopy(model)
    eager(x).backward()
    (own,) = torch.autograd.grad(eager(x), [eager.w])
    assert own.stride() != eager.w.stride(), "this model tests something"
    megatrain.compile(model, device=toy)(x).backward()
    assert model.w.grad is not None
    assert eager.w.grad is not None
    assert torch.equal(model.w.grad, eager.w.grad)
    assert all(source == out for source, out in toy.strides)
    assert (6, 3, 1) in [source for source, _ in toy.strides]


def test_the_workspace_counts_the_copy():
    model = Transposing(width=1000)
    program = lower(trace(model, (torch.randn(1, 1000),)))
    (template,) = program.templates.values()
    assert template.cost is not None
    assert template.cost.backward_workspace_bytes >= model.w.nbytes
