"""Numbers of Python that are others at each step: one capture stands for all of them, with eager's bits."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from tests.comparing import assert_same, snapshot
from tests.training.parity import loop_step

X = [torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def square(result: torch.Tensor, batch: Any) -> torch.Tensor:
    return result.square().mean()


def pair(make: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any, Any, Any, Any]:
    """A model and its optimizer for eager; the same compiled, its optimizer, and a TrainStep."""
    torch.manual_seed(0)
    eager = make()
    streamed = copy.deepcopy(eager)
    compiled = megatrain.compile(streamed, device="cpu", memory="64KiB", transfer="copy", **options)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (eager, streamed)]
    return eager, optimizers[0], compiled, optimizers[1], megatrain.TrainStep(compiled, optimizers[1], loss=square)


def captures(compiled: Any) -> int:
    return compiled.megatrain.variant.number


class Normed(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.norm(self.layer(x))))


@pytest.mark.parametrize("activations", ["recompute", "keep", "offload"])
@pytest.mark.parametrize("count", [1, 3])
def test_running_averages_over_all_batches_have_one_capture(count: int, activations: str):
    make: Any = lambda: nn.Sequential(*(Normed() for _ in range(3)))  # noqa: E731
    eager, expected, compiled, found, step = pair(make, activations=activations)
    for number in range(4):
        batches = [x + number for x in X[:count]]
        assert_same(step(batches), loop_step(eager, expected, batches, loss=square)[0])
        assert_same(snapshot(eager, expected), snapshot(compiled, found))
    assert (captures(compiled), len(compiled.program.blocks)) == (1, 3)
    assert_same(compiled(X[0]), eager(X[0]))
    compiled(X[1]).square().mean().backward()
    eager(X[1]).square().mean().backward()
    assert_same([p.grad for p in compiled.parameters()], [p.grad for p in eager.parameters()])
    with torch.no_grad():
        assert_same(compiled(X[2]), eager(X[2]))
        assert_same(compiled.eval()(X[2]), eager.eval()(X[2]))
    assert_same(dict(compiled.state_dict()), dict(eager.state_dict()))
