"""Regions in which each token is computed alone are found, are left alone where they must be, and keep the bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.passes import check_rewrite
from megatrain.passes.canonicalize import canonicalize
from megatrain.passes.rewrites.tile_tokens import tile_tokens
from megatrain.passes.rewrites.tiled_region import TiledRegion
from tests.nightly import nightly

WIDTH, WORDS, TOKENS = 32, 100, 300


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Layer(nn.Module):
    """Attention with rotary embeddings, and a gated MLP; `x` has three uses in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second = Norm(), Norm()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 6 * WIDTH, bias=False), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = [t.view(batch, length, 4, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)]
        query, key = (t * cos + torch.cat((-t[..., 4:], t[..., :4]), -1) * sin for t in heads[:2])
        mixed = F.scaled_dot_product_attention(query, key, heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.up(self.second(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        angles = torch.arange(ids.shape[1])[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03]).repeat(2)
        cos, sin = angles.cos().to(x.dtype)[None, None], angles.sin().to(x.dtype)[None, None]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


def batch(step: int, rows: int = 1, length: int = TOKENS) -> dict[str, torch.Tensor]:
    ids = torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(step))
    return {"ids": ids, "labels": ids.roll(-1)}


def regions(program: Any) -> list[TiledRegion]:
    nodes = [node for template in program.templates.values() for node in template.graph.nodes]
    return [node.target for node in nodes if isinstance(node.target, TiledRegion)]


@pytest.mark.parametrize(("dtype", "rows"), [nightly((torch.float32, 1)), (torch.bfloat16, 2)])
def test_results_and_gradients_of_tokens_have_the_bits_of_the_whole(dtype: torch.dtype, rows: int):
    model = Model().to(dtype)
    plain = copy.deepcopy(model)
    compiled = megatrain.compile(model, device="cpu", passes=[partial(tile_tokens, rows=64)])
    for step in range(2):
        for each in (plain, model):
            each.zero_grad()
        expected, found = plain(**batch(step, rows)), compiled(**batch(step, rows))
        assert torch.equal(expected, found)
        expected.backward()
        found.backward()
        # All gradients of hidden states end here.
        assert torch.equal(plain.embed.weight.grad, model.embed.weight.grad)  # pyright: ignore
        for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            # Five tiles: a norm's weight is rounded in each, to half a unit of the last place.
            rounding = torch.finfo(dtype).eps * (4 if "norm" in name or "second" in name else 2)
            error = (one.grad.double() - other.grad.double()).abs().max() / one.grad.double().abs().max()
            assert error <= (rounding if dtype == torch.bfloat16 else 1e-6), name
    texts = [region.call_text("") for region in regions(compiled.program)]
    assert sum("cat" in text for text in texts) == 1  # of a layer: before attention, and after
    assert sum("silu" in text for text in texts) == 1


def test_linear_layers_are_summed_in_fp32():
    """In bf16 the sum of 16 tiles is as near to fp64 as the whole product is."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).bfloat16()
    x = torch.randn(1, 1024, WIDTH).bfloat16()
    exact = copy.deepcopy(model).double()
    exact(x.double()).square().sum().backward()

    def error(each: nn.Module) -> float:
        each.zero_grad()
        each(x).float().square().sum().backward()
        reference = exact[0].weight.grad
        assert reference is not None
        return float((model[0].weight.grad.double() - reference).abs().max() / reference.abs().max())  # pyright: ignore

    whole = error(model)
    compiled = megatrain.compile(model, device="cpu", passes=[partial(tile_tokens, rows=64)])
    assert error(compiled) <= 1.5 * whole + 2**-9
    assert regions(compiled.program)


class Alone(nn.Module):
    """A product, then `mixing`, then a product."""

    def __init__(self, mixing: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.mixing = mixing
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.mixing(self.one(x)))


MIXING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all but the last token": lambda x: F.pad(x[:, :-1], (0, 0, 1, 0)),
    "a flip of the text": lambda x: x.flip(1),
    "a convolution": lambda x: F.conv1d(x.transpose(1, 2), torch.ones(WIDTH, 1, 3), padding=1, groups=WIDTH).mT,
    "a product of tokens": lambda x: (x @ x.mT) @ x,
    "dropout": lambda x: F.dropout(x, 0.5),
    "a write": lambda x: x.add_(1),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_tokens_is_left_out(name: str):
    """What random models don't have."""
    x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))
    traced = tile_tokens(canonicalize(megatrain.trace(Alone(MIXING[name]), (x,))), rows=64)
    calls = [node.target.call_text("") for node in traced.graph.nodes if isinstance(node.target, TiledRegion)]
    assert not any(text.count("linear") > 1 for text in calls)


# What is made of a linear layer's result, and whether a backward reads the values of the result.
USES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], bool]] = {
    "a sum": (lambda y, x: x + y, False),
    "a rotation": (lambda y, x: torch.cat((-y[..., 4:], y[..., :4]), -1) * x, False),
    "a quotient by a number": (lambda y, x: y / 3 + x, False),
    "a quotient by a tensor": (lambda y, x: y / (x + 9), False),
    "a quotient of a tensor": (lambda y, x: torch.div(x, y + 3), True),
    "a square": (lambda y, x: y * y, True),
    "an activation": (lambda y, x: y.tanh() + x, True),
    "a factor without history": (lambda y, x: x.tanh() * (y.detach() + 1) * y, True),
}


class Using(nn.Module):
    def __init__(self, use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.use = use
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.linear(x.sin()), x)


@pytest.mark.parametrize("name", USES)
def test_values_that_a_backward_reads_are_computed(name: str):
    use, is_read = USES[name]
    x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(6))
    report = check_rewrite(Using(use), partial(tile_tokens, rows=64), (x,), trials=1)
    assert report.ok, report
    (region,) = regions(megatrain.lower(megatrain.trace(Using(use), (x,)), rewrites=[partial(tile_tokens, rows=64)]))
    assert (not region.unread) == is_read


@pytest.mark.parametrize("activations", [nightly("recompute"), nightly("keep"), "offload"])
def test_a_step_that_only_fits_in_tiles_trains_as_the_loop_does(activations: str):
    model = Model()
    plain = copy.deepcopy(model)
    needed: dict[str, int] = {}
    for chunking in ("never", "always"):
        compiled = megatrain.compile(copy.deepcopy(model), device="cpu", chunking=chunking, activations=activations)
        tried = megatrain.TrainStep(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1))
        needed[chunking] = tried.prepare(batch(0, length=1000)).device_bytes
    assert needed["always"] < needed["never"] * 3 / 4
    memory = needed["always"] * 21 // 20
    compiled = megatrain.compile(model, device="cpu", memory=memory, activations=activations)
    train = megatrain.TrainStep(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(3):
        given = batch(number, length=1000)
        expected = plain(**given)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        # The first loss has the loop's bits; later ones follow weights whose gradients were sums in another order.
        torch.testing.assert_close(train(given), expected.detach(), rtol=0 if number == 0 else 1e-5, atol=0)
    train.flush()
    assert regions(train.program)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
