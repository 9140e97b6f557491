"""Masks of attention give way to causality, are made where they are read, and windows run in parts; none is wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.passes import check_rewrite
from megatrain.passes.canonicalize import canonicalize
from megatrain.passes.masks.banded_attention import BandedAttention, banded_attention
from megatrain.passes.masks.causal_attention import causal_attention
from megatrain.passes.masks.made_inside import masks_inside
from tests.tiers import diagonal, one_in

WIDTH, WORDS = 32, 50
DTYPES = [torch.float32, torch.bfloat16]
Mask = Callable[[torch.Tensor], Any]


class Layer(nn.Module):
    """Attention of 4 heads over 2 or 4 of keys, under a mask that it is given or makes."""

    def __init__(self, make: Mask | None, kv_heads: int, options: dict[str, Any]):
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, 8 * kv_heads), nn.Linear(WIDTH, 8 * kv_heads)
        self._make, self._options = make, options

    def forward(self, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        mask = mask if self._make is None else self._make(ids)
        heads = [f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask, **self._options)
        return x + self.out(mixed.transpose(1, 2).flatten(2)).relu()


class Model(nn.Module):
    """Two layers under one mask, which the model makes, or each layer its own.

    Args:
        make: Makes the mask of the ids [texts, tokens].
        own: Each layer makes it.
        kv_heads: Heads of keys and values, of 4.
        options: Of `scaled_dot_product_attention`.
    """

    def __init__(self, make: Mask, *, own: bool = False, kv_heads: int = 4, **options: Any):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer(make if own else None, kv_heads, options) for _ in range(2))
        self._make = None if own else make

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, mask = self.embed(ids), None if self._make is None else self._make(ids)
        for layer in self.layers:
            x = layer(x, ids, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1).flatten())


def batch(tokens: int = 40, texts: int = 2) -> tuple[torch.Tensor]:
    return (torch.randint(1, WORDS, (texts, tokens), generator=torch.Generator().manual_seed(0)),)


def positions(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.arange(ids.shape[1], device=ids.device)
    return index[:, None], index[None]


def causal(ids: torch.Tensor) -> torch.Tensor:
    row, column = positions(ids)
    return column <= row


def window(width: int) -> Mask:
    def make(ids: torch.Tensor) -> torch.Tensor:
        row, column = positions(ids)
        return (column <= row) & (row - column < width)

    return make


def added(ids: torch.Tensor) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(ids.shape[1])


def in_four(ids: torch.Tensor) -> torch.Tensor:
    """As Hugging Face makes it."""
    row, column = positions(ids)
    both = torch.ones((), dtype=torch.bool).logical_and(column[None, None] <= row[None, None])
    return both.expand(len(ids), -1, -1, -1)


def added_window(ids: torch.Tensor) -> torch.Tensor:
    return torch.zeros(ids.shape[1], ids.shape[1]).masked_fill(~window(50)(ids), -torch.inf)


def padded(ids: torch.Tensor) -> torch.Tensor:
    return causal(ids) & (ids < WORDS - 9)[:, None, None]


def attention(traced: Any) -> list[str]:
    return [line for line in str(traced).splitlines() if "attention(" in line]


def crossing(traced: Any, tokens: int) -> list[str]:
    """Names of values of tokens x tokens between the blocks of a capture."""
    program = megatrain.lower(traced)
    return [name for name, value in program.values.items() if value.spec.shape[-2:] == (tokens, tokens)]


CAUSAL: dict[str, tuple[Mask, int, int, dict[str, Any]]] = {
    "flags": (causal, 40, 4, {}),
    "grouped heads": (causal, 601, 2, {"enable_gqa": True, "scale": 0.3}),
    "added": (added, 130, 4, {"scale": 2}),
    "in four dimensions": (in_four, 77, 1, {"enable_gqa": True}),
    "a window that is too wide": (window(40), 40, 4, {}),  # as wide as the text: the same as causality
}


@pytest.mark.parametrize(("name", "dtype"), diagonal(CAUSAL, DTYPES))
def test_causality_takes_the_place_of_masks_with_all_bits(name: str, dtype: torch.dtype):
    make, tokens, kv_heads, options = CAUSAL[name]

    def in_dtype(ids: torch.Tensor) -> torch.Tensor:
        mask = make(ids)
        return mask if mask.dtype == torch.bool else mask.to(dtype)

    model = Model(in_dtype, kv_heads=kv_heads, **options).to(dtype)
    report = check_rewrite(model, causal_attention, batch(tokens), tolerance=0)
    assert report.ok, report
    made = causal_attention(canonicalize(megatrain.trace(model, batch(tokens))))
    assert all("is_causal=True" in line and "attn_mask=None" in line for line in attention(made))
    assert not crossing(made, tokens)
    assert "causality instead of a mask" in str(megatrain.lower(made))


def drawn(ids: torch.Tensor) -> torch.Tensor:
    row, column = positions(ids)
    return column <= row + (torch.rand(()) > 2)


def biased(ids: torch.Tensor) -> torch.Tensor:
    """ALiBi: far keys count less."""
    row, column = positions(ids)
    return ((column - row) * 0.5).masked_fill(column > row, -torch.inf)


def lower(diagonal: int) -> Mask:
    return lambda ids: torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril(diagonal)


def finite(ids: torch.Tensor) -> torch.Tensor:
    return torch.zeros(ids.shape[1], ids.shape[1]).masked_fill(~causal(ids), torch.finfo(torch.float32).min)


def written(ids: torch.Tensor) -> torch.Tensor:
    mask = causal(ids)
    mask[:, :2] = True
    return mask


NEAR_MISSES: dict[str, Model] = {
    "one diagonal more": Model(lower(1)),
    "one diagonal less": Model(lambda ids: lower(-1)(ids) | (positions(ids)[1] == 0)),
    "window": Model(window(39)),
    "padding": Model(padded),
    "of each text": Model(lambda ids: causal(ids) & (ids.sum(1) > 0)[:, None, None, None]),
    "of the input's values": Model(lambda ids: positions(ids)[1] <= positions(ids)[0] + (ids[0, 0] > 99)),
    "drawn": Model(drawn),
    "bias": Model(biased),
    "logarithms": Model(lambda ids: causal(ids).to(torch.float).log()),
    "finite": Model(finite),
    "written": Model(written),
    "dropout": Model(causal, dropout_p=0.3),
    "negative scale": Model(causal, scale=-0.5),
    "no scale": Model(causal, scale=0.0),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_left_alone(name: str):
    assert not check_rewrite(NEAR_MISSES[name], causal_attention, batch()).changed


def test_other_numbers_of_keys_than_of_queries_are_left_alone():
    class Last(nn.Module):
        """The last 8 queries; counted from the first key as torch does, or from the last."""

        def __init__(self, first: int):
            super().__init__()
            self.weight, self._first = nn.Linear(8, 8), first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.weight(x)
            mask = torch.arange(20)[None] <= torch.arange(self._first, self._first + 8)[:, None]
            return F.scaled_dot_product_attention(x[:, -8:], x, x, attn_mask=mask)

    for first in (0, 12):
        assert not check_rewrite(Last(first), causal_attention, (torch.randn(2, 20, 8),)).changed


def test_buffers_and_weights_are_no_functions_of_positions():
    class Buffered(Model):
        def __init__(self, kind: str):
            super().__init__(lambda ids: (self.bias if kind == "weight" else self.mask)[: ids.shape[1], : ids.shape[1]])
            mask = torch.ones(64, 64, dtype=torch.bool).tril()
            self.register_buffer("mask", mask)
            self.bias = nn.Parameter(torch.zeros(64, 64).masked_fill(~mask, -torch.inf))

    for kind in ("buffer", "weight"):
        for rewrite in (causal_attention, masks_inside, banded_attention):
            assert not check_rewrite(Buffered(kind), rewrite, batch()).changed


def test_a_mask_that_something_else_reads_stays_for_that():
    class Counted(Model):
        def forward(self, ids: torch.Tensor) -> Any:
            mask = causal(ids)
            x = self.layers[1](self.layers[0](self.embed(ids), ids, mask), ids, mask)
            return x * mask.float().mean(), mask

    model = Counted(causal)
    report = check_rewrite(model, causal_attention, batch(), tolerance=0)
    assert report.ok, report
    assert "le" in crossing(causal_attention(canonicalize(megatrain.trace(model, batch()))), 40)


@pytest.mark.parametrize("kind", ["encoder", "with a hint", "with padding", "with dropout"])
def test_multihead_attention_is_told_of_causality(kind: str):
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            dropout = 0.5 if kind == "with dropout" else 0.0
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=dropout, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            padding = torch.zeros(x.shape[:2]) if kind == "with padding" else None
            return self.layers(x, mask, padding, is_causal=True if kind == "with a hint" else None)

    x = torch.randn(3, 30, WIDTH)
    report = check_rewrite(Encoder(), causal_attention, (x,), tolerance=0)
    if kind in ("encoder", "with a hint"):
        assert report.ok, report
        assert not crossing(causal_attention(canonicalize(megatrain.trace(Encoder(), (x,)))), 30)
    elif kind == "with padding":
        assert not report.changed
    else:  # torch is told of causality, and it is left to it
        assert report.ok, report


INSIDE: list[Mask] = [window(9), added, causal, in_four, lambda ids: ~padded(ids).logical_not(), padded]


@pytest.mark.parametrize(("make", "dtype"), diagonal(INSIDE, DTYPES))
def test_masks_are_made_in_the_blocks_that_read_them(make: Mask, dtype: torch.dtype):
    model = Model(lambda ids: mask if (mask := make(ids)).dtype == torch.bool else mask.to(dtype)).to(dtype)
    report = check_rewrite(model, masks_inside, batch(), tolerance=0)
    assert report.ok, report
    traced = canonicalize(megatrain.trace(model, batch()))
    assert crossing(traced, 40)
    assert not crossing(masks_inside(traced), 40)


LEFT: dict[str, Model] = {
    "made in each layer": Model(padded, own=True),
    "drawn": Model(lambda ids: torch.rand(ids.shape[1], ids.shape[1]) < 0.7),
    "written": Model(lambda ids: padded(ids).logical_and_(causal(ids))),
    "with more on the way": Model(lambda ids: (ids[:, None, :, None] * positions(ids)[0] * positions(ids)[1]) % 7 != 1),
}


@pytest.mark.parametrize("name", LEFT)
def test_masks_that_blocks_had_better_not_make_are_left_alone(name: str):
    assert not check_rewrite(LEFT[name], masks_inside, batch()).changed


def test_an_input_isnt_made_anywhere():
    class Given(Model):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](self.embed(ids), ids, mask), ids, mask)

    ids = batch()[0]
    for rewrite in (causal_attention, masks_inside, banded_attention):
        assert not check_rewrite(Given(causal), rewrite, (ids, causal(ids))).changed


WINDOWS: dict[str, tuple[Mask, int, dict[str, Any]]] = {
    "window": (window(100), 4, {}),
    "grouped heads": (window(700), 1, {"enable_gqa": True, "scale": 0.25}),
    "both sides": (lambda ids: window(50)(ids) | window(30)(ids).T, 2, {"enable_gqa": True}),
    "added": (added_window, 4, {"scale": -0.1}),
}


@pytest.mark.parametrize(("name", "dtype"), diagonal(WINDOWS, DTYPES))
def test_windows_in_parts_keep_the_bits_of_results_and_of_queries(name: str, dtype: torch.dtype):
    """Gradients of keys and values are sums over three parts, each rounded to the dtype."""
    make, kv_heads, options = WINDOWS[name]

    class Alone(nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            mask = make(query[:, 0, :, 0])
            mask = mask if mask.dtype == torch.bool else mask.to(dtype)
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)

    torch.manual_seed(0)
    heads = [torch.randn(2, 1300, n, 8).transpose(1, 2).to(dtype).requires_grad_() for n in (4, kv_heads, kv_heads)]
    report = check_rewrite(Alone(), partial(banded_attention, rows=512), tuple(heads), trials=1)
    assert report.ok, report
    apart = {deviation.name: deviation.relative for deviation in report.deviations}
    assert apart["0"] == apart["query"] == 0
    for operand in ("key", "value"):
        assert 0 < apart[operand] <= 16 * torch.finfo(dtype).eps


def _written(flags: torch.Tensor) -> torch.Tensor:
    return flags.logical_and_(flags)


# Of the 24 one in five: each mask, each padding and each dtype is met.
@pytest.mark.parametrize(
    ("of", "pad", "dtype"),
    one_in(5, product(["causal", "window", "all"], ["right", "left", "holes", "one text"], DTYPES)),
)
def test_padding_in_parts_keeps_the_bits_of_results(of: str, pad: str, dtype: torch.dtype):
    """Also of queries that see no key at all, as the first ones of a text with padding on the left."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
            x = self.project(x)
            row, column = torch.arange(1300)[:, None], torch.arange(1300)
            mask = flags[:, None, None, :].to(torch.bool)
            if of != "all":
                mask = mask & (column <= row)[None, None] if of == "causal" else (column > row - 300) & mask
            mask = mask.expand(2, 1, 1300, 1300)
            mixed = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
            return torch.where(torch.isnan(mixed), 0.5, mixed)

    flags = torch.ones(1 if pad == "one text" else 2, 1300)
    places = {"right": slice(1000, None), "left": slice(700), "holes": slice(3, None, 5), "one text": slice(1000, None)}
    flags[0, places[pad]] = 0
    torch.manual_seed(0)
    inputs = torch.randn(2, 2, 1300, 8).to(dtype), flags.long()
    model = Padded().to(dtype)
    report = check_rewrite(model, partial(banded_attention, rows=512), inputs, trials=1)
    assert report.ok, report
    assert all(deviation.relative == 0 for deviation in report.deviations if deviation.kind == "output")


WHOLE: dict[str, Model] = {
    "causality": Model(causal),
    "all": Model(lambda ids: causal(ids) | ~causal(ids)),
    "padding of queries": Model(lambda ids: window(100)(ids) & (ids < WORDS - 9)[:, None, :, None]),
    "padding or a window": Model(lambda ids: window(100)(ids) | (ids < WORDS - 9)[:, None, None]),
    "added padding": Model(lambda ids: window(100)(ids)[None, None] + (ids < WORDS - 9)[:, None, None] > 1),
    "written padding": Model(lambda ids: window(100)(ids) & _written(ids < WORDS - 9)[:, None, None]),
    "dropout": Model(window(100), dropout_p=0.3),
    "queries without keys": Model(lambda ids: positions(ids)[1] < positions(ids)[0] - 3),
    "two bands": Model(lambda ids: window(100)(ids) | (positions(ids)[1] == positions(ids)[0] - 200)),
    "bias": Model(lambda ids: biased(ids).masked_fill(~window(100)(ids), -torch.inf)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_no_window_stays_whole(name: str):
    assert not check_rewrite(WHOLE[name], partial(banded_attention, rows=512), batch(600)).changed


def test_windows_run_in_parts_of_half_a_window_on_the_keys_that_these_see():
    def parts(width: int, tokens: int) -> BandedAttention | None:
        with torch.device("meta"):
            model = Model(window(width))
        traced = banded_attention(megatrain.trace(model, batch(tokens, texts=1)))
        found = [node.target for node in traced.graph.nodes if isinstance(node.target, BandedAttention)]
        return found[0] if found else None

    made = parts(4096, 20000)
    assert made is not None
    assert (made.rows, made.most_keys) == (2048, 6144)
    assert [(rows.start, keys.start, keys.stop) for rows, keys in made.parts()][3] == (6144, 2048, 8192)
    assert parts(300, 500) is None  # one part


def test_under_autocast_operands_are_cast_once():
    class Cast(Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(ids)

    for rewrite, tolerance in ((causal_attention, 0), (masks_inside, 0), (partial(banded_attention, rows=512), None)):
        make = causal if rewrite is causal_attention else window(100)
        report = check_rewrite(Cast(make), rewrite, batch(600, texts=1), trials=1, tolerance=tolerance)
        assert report.ok, report
