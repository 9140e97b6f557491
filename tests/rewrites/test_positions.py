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
from megatrain.passes.masks.diagonals import Diagonals, Line
from megatrain.passes.masks.position_proof import PositionProof
from megatrain.passes.masks.seen_band import BandMask, SeenBand
from megatrain.tracer.node_meta import CALLS
from tests.tiers import wide


class Masked(nn.Module):
    """Adds a mask to a sum of its input, so that the mask is in the graph."""

    def __init__(self, mask: Callable[[int, int], torch.Tensor]):
        super().__init__()
        self._mask = mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys = x.shape
        return self._mask(queries, keys) * x.sum()


def held(known: Diagonals | Line, node: fx.Node) -> torch.Tensor:
    """The tensor that a claim describes."""
    spec = node.meta["spec"]
    index = [torch.arange(size).view([-1] + [1] * (len(spec.shape) - 1 - dim)) for dim, size in enumerate(spec.shape)]
    if isinstance(known, Line):
        values: Any = known.offset + sum(slope * index[dim] for dim, slope in known.slopes.items())
        return torch.as_tensor(values).expand(spec.shape).to(spec.dtype)
    if known.pair is None:
        return torch.full(spec.shape, known.value, dtype=spec.dtype)
    row, column = known.pair
    difference = (index[column] - index[row]).expand(spec.shape)
    made = torch.empty(spec.shape, dtype=spec.dtype)
    for first, last, value in known.pieces:
        made[(difference >= first) & (difference <= last)] = value
    return made


def check(mask: Callable[[int, int], torch.Tensor], queries: int, keys: int) -> tuple[PositionProof, fx.Node, int]:
    """Compares all claims about a mask's graph with what a run of it makes; returns how many there were."""
    x = torch.ones(queries, keys)
    traced = megatrain.trace(Masked(mask), (x,))
    positions = PositionProof(traced.graph)
    made: dict[str, torch.Tensor] = {}
    Code(traced.graph, see=lambda node, result: made.__setitem__(node.name, result))([x])
    claims = 0
    for node in traced.graph.nodes:
        known = positions.of(node)
        if node.op not in CALLS or known is None:
            continue
        claims += 1
        assert made[node.name].dtype == node.meta["spec"].dtype
        torch.testing.assert_close(made[node.name], held(known, node), rtol=0, atol=0, equal_nan=True)
    product = next(node for node in reversed(traced.graph.nodes) if node.op in CALLS)
    return positions, product.all_input_nodes[0], claims


def rows(queries: int) -> torch.Tensor:
    return torch.arange(queries)[:, None]


CAUSAL: dict[str, Callable[[int, int], torch.Tensor]] = {
    "tril": lambda q, k: torch.tril(torch.ones(q, k)).bool(),
    "tril of flags": lambda q, k: torch.ones(q, k, dtype=torch.bool).tril(diagonal=0),
    "not triu": lambda q, k: ~torch.ones(q, k, dtype=torch.bool).triu(1),
    "triu of -inf": lambda q, k: torch.triu(torch.full((q, k), -torch.inf), diagonal=1),
    "ones times -inf": lambda q, k: (torch.ones(q, k) * -torch.inf).triu(1),
    "masked_fill": lambda q, k: torch.zeros(q, k).masked_fill(torch.tril(torch.ones(q, k)) == 0, float("-inf")),
    "where": lambda q, k: torch.where(torch.arange(k)[None] > rows(q), float("-inf"), 0.0),
    "where of tensors": lambda q, k: torch.where(
        torch.arange(k) <= rows(q), torch.zeros(q, k), torch.tensor(-torch.inf)
    ),
    "arange": lambda q, k: torch.arange(k)[None, :] <= torch.arange(q)[:, None],
    "difference": lambda q, k: rows(q) - torch.arange(k) >= 0,
    "floats": lambda q, k: torch.arange(k).float() <= torch.arange(q).float().unsqueeze(-1),
    "offset on both sides": lambda q, k: torch.arange(5, k + 5)[None] <= torch.arange(q)[:, None] + 5,
    "twice as far": lambda q, k: 2 * torch.arange(k)[None] < 2 * torch.arange(q)[:, None] + 1,
    "transposed": lambda q, k: torch.ones(k, q).triu().bool().T,
    "mT of positions": lambda q, k: (rows(k) <= torch.arange(q)).mT,
    "four dimensions": lambda q, k: (torch.arange(k)[None, None, None] <= torch.arange(q)[None, None, :, None])[0, 0],
    "expanded": lambda q, k: (torch.arange(k) <= rows(q))[None].expand(3, -1, -1)[1],
    "cut out": lambda q, k: torch.ones(q + 9, k + 4, dtype=torch.bool).tril(-3)[5 : q + 5, 2 : k + 2],
    "and": lambda q, k: (torch.arange(k) <= rows(q)) & (torch.arange(k) <= rows(q) + 7),
    "or, xor": lambda q, k: ((torch.arange(k) <= rows(q)) | (torch.arange(k) < rows(q) - 2)) ^ (torch.arange(k) < 0),
    "1 - triu": lambda q, k: (1 - torch.ones(q, k).triu(1)).to(torch.bool),
    "minus the greater": lambda q, k: -torch.arange(k) >= -rows(q),
    "torch's own": lambda q, k: nn.Transformer.generate_square_subsequent_mask(max(q, k))[:q, :k],
}


@pytest.mark.parametrize("size", [(2, 2), (17, 17), (9, 30)])
@pytest.mark.parametrize("name", CAUSAL)
def test_causality_is_found_whatever_says_it(name: str, size: tuple[int, int]):
    positions, mask, claims = check(CAUSAL[name], *size)
    band = SeenBand.of(positions.bands(mask), *size)
    assert band is not None
    assert band.is_causal
    assert claims > 1


OTHERS: dict[str, tuple[Callable[[int, int], torch.Tensor], SeenBand | None]] = {
    "one more": (lambda q, k: torch.arange(k) <= rows(q) + 1, SeenBand(None, 1)),
    "one less": (lambda q, k: torch.ones(q, k, dtype=torch.bool).tril(-1), SeenBand(None, -1)),
    "window": (lambda q, k: (torch.arange(k) <= rows(q)) & (torch.arange(k) > rows(q) - 5), SeenBand(-4, 0)),
    "window of sums": (lambda q, k: torch.ones(q, k).tril() * torch.ones(q, k).triu(-4) == 1, SeenBand(-4, 0)),
    "both sides": (lambda q, k: torch.ones(q, k).tril(3).triu(-2) - 1 >= 0, SeenBand(-2, 3)),
    "a window that is too wide": (lambda q, k: torch.ones(q, k).tril().triu(-99) > 0, SeenBand(None, 0)),
    "all": (lambda q, k: torch.arange(k) > rows(q) - 100, SeenBand(None, None)),
    "nothing": (lambda q, k: torch.arange(k) > rows(q) + 100, None),
    "the others": (lambda q, k: torch.triu(torch.ones(q, k), 1).bool(), SeenBand(1, None)),
    "two bands": (lambda q, k: (torch.arange(k) < rows(q) - 3) | (torch.arange(k) > rows(q)), None),
    "a large number": (lambda q, k: torch.zeros(q, k).masked_fill(torch.ones(q, k).triu(1) == 1, -1e9), None),
    "another addend": (lambda q, k: torch.full((q, k), -torch.inf).triu(1) + 1, None),
    "nan": (lambda q, k: (1 - torch.ones(q, k).tril()) * -torch.inf, None),
    "squares": (lambda q, k: torch.arange(k) ** 2 <= rows(q) ** 2, None),
    "half as fast": (lambda q, k: 2 * torch.arange(k) <= rows(q), None),
    "the first keys as well": (lambda q, k: (torch.arange(k) <= rows(q)) | (torch.arange(k) < 3), None),
    "every other key": (lambda q, k: (torch.arange(0, 2 * k, 2) <= rows(q)), None),
    "drawn": (lambda q, k: torch.rand(q, k) < 2, None),
    "written": (lambda q, k: torch.ones(q, k, dtype=torch.bool).tril_(), None),
    "written through a view": (lambda q, k: _written(q, k), None),
}  # fmt: skip


def _written(queries: int, keys: int) -> torch.Tensor:
    mask = torch.ones(queries, keys, dtype=torch.bool).tril()
    mask[3].fill_(True)
    return mask


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_are_told_apart(name: str):
    mask, expected = OTHERS[name]
    positions, node, _ = check(mask, 20, 20)
    assert SeenBand.of(positions.bands(node), 20, 20) == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float16])
def test_numbers_that_a_dtype_doesnt_hold_are_unknown(dtype: torch.dtype):
    """65000 + 600 isn't a number of fp16, 2**24 + 1 none of fp32."""
    far = {torch.int32: 2**31 - 40, torch.float32: 2**24 - 10, torch.float16: 2**15}[dtype]
    positions, node, _ = check(lambda q, k: torch.arange(k).to(dtype) + far <= rows(q).to(dtype) + far, 50, 50)
    assert positions.bands(node) is None


def test_inputs_and_weights_are_unknown():
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.causal = nn.Buffer(torch.ones(20, 20, dtype=torch.bool).tril())

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            mask = torch.ones(20, 20, dtype=torch.bool).tril()
            return (mask & padding[:, None]) * x, self.causal.logical_and(mask) * x

    traced = megatrain.trace(Padded(), (torch.ones(20, 20), torch.ones(20, dtype=torch.bool)))
    positions = PositionProof(traced.graph)
    known = {node.name for node in traced.graph.nodes if positions.of(node) is not None}
    assert {"ones", "tril"} <= known
    assert not any(name.startswith(("and", "logical_and", "mul")) for name in known)


def _random_mask(draw: random.Random) -> Callable[[int, int], torch.Tensor]:
    """A mask of a few random calls."""
    seed = draw.random()

    def numbers(choose: random.Random, q: int, k: int) -> torch.Tensor:
        one, other = torch.arange(k)[None], torch.arange(q)[:, None]
        made = choose.choice([one, other, one - other, other - one, one + other, one * 2 - other * 2])
        return choose.choice(
            [lambda t: t, lambda t: t + 3, lambda t: 2 - t, lambda t: -t, lambda t: t * 3, torch.Tensor.float]
        )(made)

    def flags(choose: random.Random, q: int, k: int, depth: int) -> torch.Tensor:
        compare = choose.choice([torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne])
        leaf = [
            lambda: compare(numbers(choose, q, k), choose.choice([0, 1, -4, 6.0, numbers(choose, q, k)])).expand(q, k),
            lambda: torch.ones(q, k, dtype=torch.bool).tril(choose.randint(-9, 9)),
            lambda: torch.full((q, k), choose.choice([1.0, -torch.inf, 2.5])).triu(choose.randint(-9, 9)) == 0,
            lambda: torch.zeros(q, k).masked_fill(torch.ones(k, q).tril(choose.randint(-3, 3)).T > 0, 3) - 1 < 1,
        ]
        inner = [
            lambda: flags(choose, q, k, depth - 1) & flags(choose, q, k, depth - 1),
            lambda: flags(choose, q, k, depth - 1) | flags(choose, q, k, depth - 1),
            lambda: ~flags(choose, q, k, depth - 1),
            lambda: flags(choose, k, q, depth - 1).mT,
            lambda: flags(choose, q + 3, k + 6, depth - 1)[2 : q + 2, 4 : k + 4],
            lambda: torch.where(flags(choose, q, k, depth - 1), 1.5, flags(choose, q, k, depth - 1).float()) > 0.5,
            lambda: flags(choose, q, k, depth - 1)[None, None].expand(2, 1, q, k)[1, 0].float().tril(2) != 0,
            lambda: (
                flags(choose, q, k, depth - 1).to(torch.int64).mul(3).sub(1).maximum(torch.zeros((), dtype=torch.int64))
                > 0
            ),
        ]
        return choose.choice(inner if depth else leaf)()

    return lambda q, k: flags(random.Random(seed), q, k, 3).expand(q, k)  # fmt: skip


@pytest.mark.parametrize("seed", [*range(8), *map(wide, range(8, 60))])
def test_nothing_that_is_claimed_of_random_masks_is_wrong(seed: int):
    draw = random.Random(seed)
    claims = sum(check(_random_mask(draw), draw.randint(1, 12), draw.randint(1, 12))[2] for _ in range(5))
    assert claims > 20


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_a_mask_from_lengths_holds_what_the_calls_made(dtype: torch.dtype):
    for band in (SeenBand(-4, 0), SeenBand(None, 3), SeenBand(2, None), SeenBand(-7, 5), SeenBand(None, None)):
        seen = torch.ones(37, 50, dtype=torch.bool)
        if band.last is not None:
            seen = seen.tril(band.last)
        if band.first is not None:
            seen = seen.triu(band.first)
        expected = seen if dtype == torch.bool else torch.zeros(37, 50, dtype=dtype).masked_fill(~seen, -torch.inf)
        assert torch.equal(BandMask(band, 37, 50, dtype, torch.device("cpu"))(), expected)
        for start, end in ((0, 3), (5, 20), (30, 37)):
            least, most = band.keys_of(start, end, 50)
            assert not seen[start:end, :least].any()
            assert not seen[start:end, most:].any()
        assert band.reaches_all(37, 50) == bool(seen.any(1).all())
