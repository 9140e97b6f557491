"""What is claimed of a tensor that depends on positions alone is what it holds, whatever calls made it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import megatrain
from megatrain.passes.interpret import Code
from megatrain.passes.rewrites.masked_attention import SeenBand
from megatrain.passes.rewrites.positions import Known, PositionProof
from megatrain.tracer.spec import CALLS
from tests.nightly import nightly

Mask = Callable[[int, int], torch.Tensor]


class Masked(nn.Module):
    """Multiplies a mask by a sum of its input, so that the mask is in the graph."""

    def __init__(self, mask: Mask):
        super().__init__()
        self._mask = mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._mask(*x.shape) * x.sum()


def held(known: Known, node: fx.Node) -> torch.Tensor:
    """The tensor that a claim describes."""
    shape = node.meta["spec"].shape
    index = [torch.arange(size).view([-1] + [1] * (len(shape) - 1 - dim)) for dim, size in enumerate(shape)]
    place: Any = index[known.dims[-1]] if known.dims else torch.zeros((), dtype=torch.long)
    if len(known.dims) == 2:
        place = place - index[known.dims[0]] + shape[known.dims[0]] - 1
    return known.values[place].expand(shape)


def check(mask: Mask, queries: int, keys: int) -> tuple[SeenBand | None, int]:
    """Compares all claims about a mask's graph with what a run of it makes; returns the band, and how many claims."""
    x = torch.ones(queries, keys)
    traced = megatrain.trace(Masked(mask), (x,))
    positions, claims, made = PositionProof(traced.graph), 0, dict[str, torch.Tensor]()
    Code(traced.graph, see=lambda node, result: made.__setitem__(node.name, result))([x])
    for node in traced.graph.nodes:
        known = positions.of(node)
        if node.op in CALLS and known is not None:
            claims += 1
            torch.testing.assert_close(made[node.name], held(known, node), rtol=0, atol=0, equal_nan=True)
    product = next(node for node in reversed(traced.graph.nodes) if node.op in CALLS)
    return SeenBand.of(positions.of(product.all_input_nodes[0]), queries, keys), claims


def rows(queries: int) -> torch.Tensor:
    return torch.arange(queries)[:, None]


CAUSAL: dict[str, Mask] = {
    "tril": lambda q, k: torch.tril(torch.ones(q, k)).bool(),
    "not triu": lambda q, k: ~torch.ones(q, k, dtype=torch.bool).triu(1),
    "masked_fill": lambda q, k: torch.zeros(q, k).masked_fill(torch.tril(torch.ones(q, k)) == 0, float("-inf")),
    "mT of positions": lambda q, k: (rows(k) <= torch.arange(q)).mT,
    "1 - triu": lambda q, k: (1 - torch.ones(q, k).triu(1)).to(torch.bool),
    "every other one of twice as many": lambda q, k: torch.arange(2 * k)[::2] <= torch.arange(2 * q)[::2, None],
    "torch's own": lambda q, k: nn.Transformer.generate_square_subsequent_mask(max(q, k))[:q, :k],
}


@pytest.mark.parametrize("name", CAUSAL)
def test_causality_is_found_whatever_says_it(name: str):
    for size in ((2, 2), (17, 17), (9, 30)):
        band, claims = check(CAUSAL[name], *size)
        assert band == SeenBand(None, 0)
        assert claims > 1


def written(queries: int, keys: int) -> torch.Tensor:
    mask = torch.ones(queries, keys, dtype=torch.bool).tril()
    mask[3].fill_(True)
    return mask


def far(offset: int, dtype: torch.dtype) -> Mask:
    """At numbers that a dtype doesn't hold: 65000 + 600 isn't one of fp16, 2**24 + 1 none of fp32."""
    return lambda q, k: torch.arange(k).to(dtype) + offset <= rows(q).to(dtype) + offset


OTHERS: dict[str, tuple[Mask, SeenBand | None]] = {
    "window": (lambda q, k: (torch.arange(k) <= rows(q)) & (torch.arange(k) > rows(q) - 5), SeenBand(-4, 0)),
    "both sides": (lambda q, k: torch.ones(q, k).tril(3).triu(-2) - 1 >= 0, SeenBand(-2, 3)),
    "a window that is too wide": (lambda q, k: torch.ones(q, k).tril().triu(-99) > 0, SeenBand(None, 0)),
    "all": (lambda q, k: torch.arange(k) > rows(q) - 100, SeenBand(None, None)),
    "two bands": (lambda q, k: (torch.arange(k) < rows(q) - 3) | (torch.arange(k) > rows(q)), None),
    "a large number": (lambda q, k: torch.zeros(q, k).masked_fill(torch.ones(q, k).triu(1) == 1, -1e9), None),
    "another addend": (lambda q, k: torch.full((q, k), -torch.inf).triu(1) + 1, None),
    "nan": (lambda q, k: (1 - torch.ones(q, k).tril()) * -torch.inf, None),
    "squares": (lambda q, k: torch.arange(k) ** 2 <= rows(q) ** 2, None),
    "of a sum": (lambda q, k: torch.arange(k) + rows(q) <= 12, None),
    "the first keys as well": (lambda q, k: (torch.arange(k) <= rows(q)) | (torch.arange(k) < 3), None),
    "written": (lambda q, k: torch.ones(q, k, dtype=torch.bool).tril_(), None),
    "written through a view": (written, None),
    "int32": (far(2**31 - 40, torch.int32), None),
    "fp32": (far(2**24 - 10, torch.float32), None),
    "fp16": (far(2**15, torch.float16), None),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_are_told_apart(name: str):
    mask, expected = OTHERS[name]
    assert check(mask, 20, 20)[0] == expected


def random_flags(choose: random.Random, q: int, k: int, depth: int) -> torch.Tensor:
    """A mask of a few random calls."""

    def number() -> torch.Tensor:
        one, other = torch.arange(k)[None], rows(q)
        made = choose.choice([one, other, one - other, other - one, one + other, one * 2 - other * 2])
        return choose.choice([made, made + 3, 2 - made, -made, made * 3, made.float()])

    def inner(queries: int = q, keys: int = k) -> torch.Tensor:
        return random_flags(choose, queries, keys, depth - 1)

    compare = choose.choice([torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne])
    leaves = [
        lambda: compare(number(), choose.choice([0, 1, -4, 6.0, number()])),
        lambda: torch.ones(q, k, dtype=torch.bool).tril(choose.randint(-9, 9)),
        lambda: torch.full((q, k), choose.choice([1.0, -torch.inf, 2.5])).triu(choose.randint(-9, 9)) == 0,
        lambda: torch.zeros(q, k).masked_fill(torch.ones(k, q).tril(choose.randint(-3, 3)).T > 0, 3) - 1 < 1,
    ]
    calls = [
        lambda: inner() & inner(),
        lambda: inner() | ~inner(),
        lambda: inner(k, q).mT,
        lambda: inner(q + 3, k + 6)[2 : q + 2, 4 : k + 4],
        lambda: torch.where(inner(), 1.5, inner().float()) > 0.5,
        lambda: inner()[None, None].expand(2, 1, q, k)[1, 0].float().tril(2) != 0,
        lambda: inner().to(torch.int64).mul(3).sub(1).maximum(torch.zeros((), dtype=torch.int64)) > 0,
    ]
    return choose.choice(calls if depth else leaves)().expand(q, k)


@pytest.mark.parametrize("seed", [*range(6), *map(nightly, range(6, 60))])
def test_nothing_that_is_claimed_of_random_masks_is_wrong(seed: int):
    draw = random.Random(seed)
    seeds = [draw.random() for _ in range(5)]
    sizes = [(draw.randint(1, 12), draw.randint(1, 12)) for _ in seeds]
    masks = [lambda q, k, each=each: random_flags(random.Random(each), q, k, 3) for each in seeds]
    assert sum(check(mask, *size)[1] for mask, size in zip(masks, sizes, strict=True)) > 20


def test_a_band_makes_the_mask_of_some_queries_and_keys():
    for band in (SeenBand(-4, 0), SeenBand(None, 3), SeenBand(2, None), SeenBand(-700, 5), SeenBand(None, None)):
        seen = torch.ones(1100, 1400, dtype=torch.bool)
        seen = seen if band.last is None else seen.tril(band.last)
        seen = seen if band.first is None else seen.triu(band.first)
        assert band.reaches_all(1100, 1400) == bool(seen.any(1).all())
        for part in (slice(0, 512), slice(512, 1024), slice(1024, 1100)):
            keys = band.keys_of(part, 1400)
            assert torch.equal(band.flags(part, keys, torch.device("cpu")), seen[part, keys])
            assert int(seen[part].sum()) == int(seen[part, keys].sum())
