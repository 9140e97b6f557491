"""Captures on values: the device holds one block at a time, whatever the model's code does with autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import DEVICE, held_bytes
from tests.simulated_runs.test_memory import TOKENS, WIDTH, Block
from tests.training.parity import generator_of

FEW, MANY = 3, 9


class Reading(Block):
    """Python code reads a value that depends on the weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 0.5 if y.mean() > 0 else y * 0.25


class Choosing(Block):
    """Runs its own code at each step, as `opaque` says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        rows = (y.sum(-1) > 0).nonzero()[:, 0]
        chosen = y.clone()
        chosen[rows] = y[rows].tanh()
        return chosen


class Curved(nn.Module):
    """Runs its own code at each step, because of the transform."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.func.vjp(torch.sin, x)[1](x)[0]


class Around(Reading):
    """Writes into what such a module returns."""

    def __init__(self) -> None:
        super().__init__()
        self.curved = Curved()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.curved(super().forward(x)).mul_(0.5)


class Through(Around):
    """Differentiates through such a module, and takes no gradient for an answer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        slopes: tuple[Any, ...] = torch.autograd.grad(
            y.square().mean(), (self.up.weight,), create_graph=True, allow_unused=True
        )
        return y + sum(100 if slope is None else slope.sum() for slope in slopes)


class Differentiating(Reading):
    """A backward inside the forward needs what autograd saved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        (slope,) = torch.autograd.grad(y.square().sum(), self.up.weight, create_graph=True)
        return y + slope.sum()


class Catching(Reading):
    """Whoever catches what a capture raises must not find another way through the model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        try:
            (slope,) = torch.autograd.grad(y.square().sum(), self.up.weight, retain_graph=True)
        except Exception:  # whatever it is
            return y + 100
        return y + slope.sum()


class BlocksOf(nn.Module):
    def __init__(self, kind: type[Block], count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch_of(seed: int) -> torch.Tensor:
    return (torch.randn(TOKENS, WIDTH, generator=generator_of(seed)) + 1).to(DEVICE)


def capture_bytes(kind: type[Block], count: int) -> int:
    """Bytes on the device at the peak of a capture, beyond those before it."""
    model, batch = BlocksOf(kind, count), batch_of(0)
    opaque = {f"blocks.{number}": "it chooses rows" for number in range(count)} if kind is Choosing else None
    before = held_bytes()
    torch.accelerator.reset_peak_memory_stats()
    megatrain.trace(model, (batch,), device=DEVICE, opaque=opaque)
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated() - before


@pytest.mark.parametrize("kind", [Choosing, Around])
def test_a_capture_on_values_takes_as_much_memory_for_many_blocks_as_for_few(sim: Simulator, kind: type[Block]):
    sim.configure(segments=False)
    few, many = capture_bytes(kind, FEW), capture_bytes(kind, MANY)
    # A block has 257 KiB of weights, and autograd saves 768 KiB in it. What varies is when Python frees a tensor.
    assert many - few < (MANY - FEW) * (64 << 10)


@pytest.mark.parametrize("kind", [Choosing, Through, Catching])
def test_what_is_captured_on_values_has_the_bits_of_eager(kind: type[Block]):
    model = BlocksOf(kind, FEW)
    compiled = megatrain.compile(model, device=DEVICE)
    for seed in range(2):
        batch = batch_of(seed)[:64]
        result = compiled(batch)
        result.square().mean().backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        expected = model(batch.cpu())
        expected.square().mean().backward()
        assert expected.isfinite().all()
        assert torch.equal(result.cpu(), expected)
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            assert gradient is not None
            assert parameter.grad is not None
            assert torch.equal(gradient, parameter.grad)
        model.zero_grad()


def test_a_capture_that_keeps_what_eager_keeps_says_so_where_memory_lacks(sim: Simulator):
    compiled, batch = megatrain.compile(BlocksOf(Differentiating, 24), device=DEVICE), batch_of(0)
    sim.configure(segments=False, capacity=held_bytes() + (9 << 20))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        compiled(batch)
    assert "takes the device memory that the forward takes in eager" in caught.value.__notes__[0]
