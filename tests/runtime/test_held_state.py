"""State that an autograd.Function keeps in its context: the slots under it are written again before its backward."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import ScheduleError
from megatrain.sizes import parse_bytes
from tests.comparing import assert_same

WIDTHS = (32, 64, 128, 256)


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight  # past what autograd saves, and past megatrain's hooks on that
        return x @ weight.t()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] @ ctx.weight, None


class Saved(Kept):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] @ ctx.saved_tensors[0], None


class Layer(nn.Module):
    def __init__(self, width: int, function: Any = Kept):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 64) / 8, requires_grad=False)
        self.out = nn.Linear(width, 64)
        self.function = function

    def forward(self, x):
        return self.out(self.function.apply(x, self.weight.view(-1, 64)).tanh())


def model(seed: int, function: Any = Kept) -> nn.Sequential:
    dice = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(*(Layer(dice.choice(WIDTHS), function) for _ in range(9)))


@pytest.mark.parametrize(("seed", "memory"), [(4, "690KiB"), (4, "900KiB"), (1, "900KiB")])
@pytest.mark.parametrize("activations", ["keep", "auto"])
def test_a_backward_after_another_call_reads_the_weights_of_its_own_block(
    seed: int, memory: str, activations: str
) -> None:
    eager = model(seed)
    streamed = copy.deepcopy(eager)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    compiled = megatrain.compile(streamed, device="cpu", memory=memory, activations=activations)
    try:
        result = compiled(x)
    except ScheduleError:
        assert activations == "keep"  # the copies count, so that this budget holds no graph of all blocks
        return
    compiled(x + 1)  # other weights lie in the slots now
    result.square().sum().backward()
    eager(x).square().sum().backward()
    assert_same({n: p.grad for n, p in eager.named_parameters()}, {n: p.grad for n, p in streamed.named_parameters()})
    assert compiled.peak_bytes <= parse_bytes(memory)


def test_only_what_is_kept_past_autograd_is_copied_and_counted() -> None:
    x = torch.randn(4, 64)
    costs = {
        kind: [t.cost for t in megatrain.lower(megatrain.trace(model(4, kind), (x,))).templates.values()]
        for kind in (Kept, Saved)
    }
    for kept, saved in zip(costs[Kept], costs[Saved], strict=True):
        assert kept is not None
        assert saved is not None
        assert (kept.held_state, saved.held_state) == ((0,), ())
        assert kept.saved_bytes > saved.saved_bytes
