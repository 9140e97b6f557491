"""Random models of calls that treat each token alone and of calls that don't: tiled or not, none is wrong."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.passes.rewrites.tile_tokens import tile_tokens
from megatrain.passes.rewrites.tiled_region import TiledRegion
from tests.nightly import nightly

WIDTH, TOKENS = 8, 130


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:2], 2, -1).transpose(1, 2)


def _attention(_: Random, a: torch.Tensor, b: torch.Tensor, i: int) -> torch.Tensor:
    mixed = F.scaled_dot_product_attention(_heads(a), _heads(b), _heads(a), is_causal=True)
    return mixed.transpose(1, 2).reshape(a.shape)


def _chosen(_: Random, a: torch.Tensor, b: torch.Tensor, i: int) -> torch.Tensor:
    weights, indices = a.topk(3, -1)
    return a + b.gather(-1, indices).sum(-1, keepdim=True) * weights.softmax(-1).amax(-1, keepdim=True)


def _unseen(_: Random, a: torch.Tensor, b: torch.Tensor, i: int) -> torch.Tensor:
    with torch.no_grad():
        factor = a * 2 + b
    return factor * b


def _turned(_: Random, a: torch.Tensor, b: torch.Tensor, i: int) -> torch.Tensor:
    one, other = a.chunk(2, -1)
    return torch.cat((-other, one), -1) * b.tanh()


Use = Callable[["Random", torch.Tensor, torch.Tensor, int], torch.Tensor]
ALONE: list[Use] = [
    lambda m, a, b, i: m.linears[i % 3](a),
    lambda m, a, b, i: m.linears[i % 3](a) + b,
    lambda m, a, b, i: m.linears[i % 3](a.reshape(-1, WIDTH)).view(a.shape),
    lambda m, a, b, i: a @ m.weight(i),
    lambda m, a, b, i: torch.einsum("bth,hk->btk", a, m.weight(i)),
    lambda m, a, b, i: a - b,
    lambda m, a, b, i: a.tanh() * b.tanh(),
    lambda m, a, b, i: torch.div(a.detach(), b * b + 2),
    lambda m, a, b, i: torch.div(m.steady, m.linears[i % 3](b.tanh()) + 9) + a,
    lambda m, a, b, i: 3 / (a * a + 2),
    lambda m, a, b, i: F.silu(a) + m.table,
    lambda m, a, b, i: m.norm(a) * m.scale,
    lambda m, a, b, i: a * torch.rsqrt(a.var(-1, keepdim=True) + 1),
    lambda m, a, b, i: torch.where(a > b, a, b * 0.5),
    lambda m, a, b, i: (_heads(a) * _heads(b).sigmoid()).transpose(1, 2).reshape(a.shape),
    lambda m, a, b, i: a[..., i % WIDTH].unsqueeze(-1) * b.tanh(),
    lambda m, a, b, i: torch.matmul(a.tanh().unsqueeze(-1), b.tanh().unsqueeze(-2)).sum(-1),
    lambda m, a, b, i: b - a.logsumexp(-1, keepdim=True),
    lambda m, a, b, i: a.cumsum(-1) * 0.3 + b.flip(-1),
    _chosen,
    _unseen,
    _turned,
]
MIXING: list[Use] = [
    _attention,
    lambda m, a, b, i: a.cumsum(1) * 0.02,
    lambda m, a, b, i: a - b.mean(1, keepdim=True),
    lambda m, a, b, i: a.roll(1, 1) + b,
    lambda m, a, b, i: torch.cat((a[:, :1], b[:, :-1]), 1),
    lambda m, a, b, i: a.softmax(1),
    lambda m, a, b, i: a - b[:, :1],
]


class Random(nn.Module):
    """Calls drawn at random; each reads two of the last four results."""

    steady: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        dice = random.Random(seed)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=dice.random() < 0.5) for _ in range(3))
        self.scale, self.table = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.rand(1, 1, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("steady", torch.rand(1, TOKENS, WIDTH))
        if dice.random() < 0.3:
            self.linears[0].requires_grad_(False)
        kinds = dice.choices((ALONE, MIXING), (5, 1), k=dice.randint(6, 16))
        self.uses = [(dice.choice(kind), dice.randrange(4), dice.randrange(4), dice.randrange(4)) for kind in kinds]

    def weight(self, i: int) -> torch.Tensor:
        return self.get_parameter(f"linears.{i % 3}.weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [x, x.tanh()]
        for use, first, second, i in self.uses:
            made.append(use(self, made[-1 - first % len(made)], made[-1 - second % len(made)], i))
        return made[-1] + made[-2] * 2 + (made[0] if len(self.uses) % 2 else 0)


def is_right(seed: int) -> bool:
    """Compares a model with eager PyTorch, in fp64; returns whether any of it is tiled."""
    model = Random(seed).double()
    plain = copy.deepcopy(model)
    compiled = megatrain.compile(
        model,
        device="cpu",
        passes=[partial(tile_tokens, rows=64)],
        activations=("recompute", "keep")[seed % 2],
    )
    given = torch.randn(1 + seed % 3 // 2, TOKENS, WIDTH, dtype=torch.float64)
    inputs = [given.clone().requires_grad_(seed % 4 == 0) for _ in range(2)]
    expected, found = plain(inputs[0]), compiled(inputs[1])
    assert torch.equal(expected, found)
    if not expected.requires_grad:
        return False
    seeds = torch.randn_like(expected)
    expected.backward(seeds)
    found.backward(seeds)
    for one, other in zip((inputs[0], *plain.parameters()), (inputs[1], *model.parameters()), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            # Sums of 260 terms in another order; some gradients are zero but for rounding.
            bound = 1e-11 * max(1.0, float(one.grad.abs().max()))
            assert (one.grad - other.grad).abs().max() <= bound
    return any(isinstance(n.target, TiledRegion) for t in compiled.program.templates.values() for n in t.graph.nodes)


@pytest.mark.parametrize(("first", "count"), [(0, 5), *(nightly((start, 20)) for start in range(0, 400, 20))])
def test_random_models_are_right_tiled_or_not(first: int, count: int):
    assert sum(map(is_right, range(first, first + count))) >= count // 4
