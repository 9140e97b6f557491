"""Masks of attention give way to causality, and windows and padding run in parts; steps that need it train as eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.base.sizes import parse_bytes
from megatrain.errors import TooSmallError
from megatrain.passes import check_rewrite
from megatrain.passes.canonicalize import canonicalize
from megatrain.passes.rewrites.masked_attention import (
    ATTENTION,
    BandedAttention,
    banded_attention,
    causal_attention,
)

WIDTH, WORDS = 32, 50
DTYPES = [torch.float32, torch.bfloat16]
Mask = Callable[[torch.Tensor], Any]
IN_PARTS = partial(banded_attention, rows=512)


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
    """Two layers under one mask, which the model makes, or each layer its own."""

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


def batch(tokens: int = 40, texts: int = 2, seed: int = 0) -> tuple[torch.Tensor]:
    return (torch.randint(1, WORDS, (texts, tokens), generator=torch.Generator().manual_seed(seed)),)


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


def padded(ids: torch.Tensor) -> torch.Tensor:
    return causal(ids) & (ids < WORDS - 9)[:, None, None]


CAUSAL: dict[str, tuple[Mask, int, int, dict[str, Any]]] = {
    "flags": (causal, 40, 4, {}),
    "grouped heads": (causal, 601, 2, {"enable_gqa": True, "scale": 0.3}),
    "added": (added, 130, 4, {"scale": 2}),
    "in four dimensions": (in_four, 77, 1, {"enable_gqa": True}),
    "a window that is too wide": (window(40), 40, 4, {}),  # as wide as the text: the same as causality
}


@pytest.mark.parametrize(("name", "dtype"), list(zip(CAUSAL, cycle(DTYPES), strict=False)))
def test_causality_takes_the_place_of_masks_with_all_bits(name: str, dtype: torch.dtype):
    make, tokens, kv_heads, options = CAUSAL[name]
    model = Model(lambda ids: m if (m := make(ids)).dtype == torch.bool else m.to(dtype), kv_heads=kv_heads, **options)
    report = check_rewrite(model.to(dtype), causal_attention, batch(tokens), tolerance=0)
    assert report.ok, report
    made = causal_attention(canonicalize(megatrain.trace(model, batch(tokens))))
    calls = [line for line in str(made).splitlines() if "attention(" in line]
    assert all("is_causal=True" in line and "attn_mask=None" in line for line in calls)
    program = megatrain.lower(made)
    assert not [name for name, value in program.values.items() if value.spec.shape[-2:] == (tokens, tokens)]
    assert "causality instead of a mask" in str(program)


def biased(ids: torch.Tensor) -> torch.Tensor:
    """ALiBi: far keys count less."""
    row, column = positions(ids)
    return ((column - row) * 0.5).masked_fill(column > row, -torch.inf)


def written(flags: torch.Tensor, *, into: slice = slice(None)) -> torch.Tensor:
    flags[:, into] |= True
    return flags


def of_state(kind: str) -> Model:
    """A buffer or a weight holds the mask, which no graph proves."""
    model = Model(lambda ids: (model.bias if kind == "weight" else model.mask)[: ids.shape[1], : ids.shape[1]])  # pyright: ignore
    model.register_buffer("mask", torch.ones(600, 600, dtype=torch.bool).tril())
    model.bias = nn.Parameter(torch.zeros(600, 600).masked_fill(~model.mask, -torch.inf))  # pyright: ignore
    return model


NEAR_MISSES: dict[str, Model] = {
    "one diagonal less": Model(lambda ids: causal(ids).tril(-1) | (positions(ids)[1] == 0)),
    "of the input's values": Model(lambda ids: positions(ids)[1] <= positions(ids)[0] + (ids[0, 0] > 99)),
    "drawn": Model(lambda ids: positions(ids)[1] <= positions(ids)[0] + (torch.rand(()) > 2)),
    "bias": Model(biased),
    "finite": Model(lambda ids: torch.zeros(ids.shape[1], ids.shape[1]).masked_fill(~causal(ids), -1e30)),
    "written": Model(lambda ids: written(causal(ids), into=slice(2))),
    "dropout": Model(window(100), dropout_p=0.3),
    "negative scale": Model(causal, scale=-0.5),
    "no scale": Model(causal, scale=0.0),
    "buffer": of_state("buffer"),
    "weight": of_state("weight"),
    "padding of queries": Model(lambda ids: window(100)(ids) & (ids < WORDS - 9)[:, None, :, None]),
    "padding or a window": Model(lambda ids: window(100)(ids) | (ids < WORDS - 9)[:, None, None]),
    "added padding": Model(lambda ids: window(100)(ids)[None, None] + (ids < WORDS - 9)[:, None, None] > 1),
    "written padding": Model(lambda ids: window(100)(ids) & written(ids < WORDS - 9)[:, None, None]),
    "queries without keys": Model(lambda ids: positions(ids)[1] < positions(ids)[0] - 3),
    "two bands": Model(lambda ids: window(100)(ids) | (positions(ids)[1] == positions(ids)[0] - 200)),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_left_alone(name: str):
    traced = canonicalize(megatrain.trace(NEAR_MISSES[name], batch(600)))
    for rewrite in (causal_attention, IN_PARTS):
        assert str(rewrite(traced)) == str(traced)


def test_a_mask_that_something_else_reads_stays_for_that():
    class Counted(Model):
        def forward(self, ids: torch.Tensor) -> Any:
            mask = causal(ids)
            x = self.layers[1](self.layers[0](self.embed(ids), ids, mask), ids, mask)
            return x * mask.float().mean(), mask

    report = check_rewrite(Counted(causal), causal_attention, batch(), tolerance=0)
    assert report.ok, report
    assert report.changed


PADDINGS = {"right": slice(1000, None), "left": slice(700), "holes": slice(3, None, 5)}
PARTED: dict[str, tuple[Mask, int, dict[str, Any]]] = {
    "window": (window(100), 4, {}),
    "grouped heads": (window(700), 1, {"enable_gqa": True, "scale": 0.25}),
    "both sides": (lambda ids: window(50)(ids) | window(30)(ids).T, 2, {"enable_gqa": True}),
    "added": (lambda ids: torch.zeros(1300, 1300).masked_fill(~window(50)(ids), -torch.inf), 4, {"scale": -0.1}),
    "causal, right": (causal, 4, {}),
    "causal, left": (causal, 4, {}),
    "window, left": (window(300), 4, {}),
    "window, holes": (window(300), 4, {}),
    "all, right": (lambda ids: causal(ids) | ~causal(ids), 4, {}),
    "all, holes": (lambda ids: causal(ids) | ~causal(ids), 4, {}),
}


@pytest.mark.parametrize(("name", "dtype"), list(zip(PARTED, cycle(DTYPES), strict=False)))
def test_parts_keep_the_bits_of_results_and_of_queries(name: str, dtype: torch.dtype):
    """Also of queries that see no key at all, as the first ones of a text with padding on the left.

    Gradients of keys and values are sums over three parts, each rounded to the dtype.
    """
    make, kv_heads, options = PARTED[name]
    padding = torch.ones(2, 1300, dtype=torch.bool)
    padding[0, PADDINGS[name.split(", ")[1]] if ", " in name else slice(0)] = False

    class Alone(nn.Module):
        def forward(self, query: Any, key: Any, value: Any, padding: torch.Tensor) -> torch.Tensor:
            mask = make(query[:, 0, :, 0])
            mask = (
                mask & padding[:, None, None] if ", " in name else mask if mask.dtype == torch.bool else mask.to(dtype)
            )
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
            return torch.where(torch.isnan(mixed), 0.5, mixed)

    torch.manual_seed(0)
    heads = [torch.randn(2, 1300, n, 8).transpose(1, 2).to(dtype).requires_grad_() for n in (4, kv_heads, kv_heads)]
    report = check_rewrite(Alone(), IN_PARTS, (*heads, padding), trials=1)
    assert report.ok, report
    apart = {deviation.name: deviation.relative for deviation in report.deviations}
    assert apart["0"] == apart["query"] == 0
    for operand in ("key", "value"):
        assert 0 < apart[operand] <= 16 * torch.finfo(dtype).eps


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
    assert [(rows.start, keys.start, keys.stop) for rows, keys in made.ranges()][3] == (6144, 2048, 8192)
    assert parts(300, 500) is None  # one part


def step_of(model: nn.Module, **options: Any) -> Any:
    compiled = megatrain.compile(model, device="cpu", **options)
    return megatrain.TrainStep(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9))


def masks_of(program: Any) -> set[str]:
    """What became of masks: the text for each call of attention."""
    nodes = [node for template in program.templates.values() for node in template.graph.nodes]
    calls = [node for node in nodes if node.target is ATTENTION or isinstance(node.target, BandedAttention)]
    return {node.meta["mask"].text if "mask" in node.meta else "whole" for node in calls}


# A mask of flags has 1.4 MB, one of numbers 5.8 MB, which the kernel makes of flags as well.
STEPS: dict[str, tuple[Mask, str, str]] = {
    "flags": (causal, "4MiB", "causality"),
    "added": (added, "4MiB", "causality"),
    "window": (window(200), "6MiB", "512 queries at a time"),
    "padded": (padded, "6MiB", "512 queries at a time"),
}


@pytest.mark.usefixtures("no_smaller_blocks")
@pytest.mark.parametrize("name", list(STEPS)[::2])
def test_masks_are_left_out_where_a_step_doesnt_fit_and_it_trains_as_eager_does(name: str):
    """Causality keeps all bits: losses, gradients, and weights after updates."""
    make, memory, text = STEPS[name]
    model = Model(make)
    loop = copy.deepcopy(model)
    optimizer = torch.optim.SGD(loop.parameters(), lr=0.1, momentum=0.9)
    large = step_of(copy.deepcopy(model), memory="1GiB")
    large.prepare({"ids": batch(1200, 1)[0]})
    assert masks_of(large.program) == {"whole"}
    with pytest.raises(TooSmallError):
        step_of(copy.deepcopy(model), memory=memory, chunking="never").prepare({"ids": batch(1200, 1)[0]})
    step = step_of(model, memory=memory)
    schedule = step.prepare({"ids": batch(1200, 1)[0]})
    assert masks_of(step.program) == {text}
    for number in range(3):
        ids = batch(1200, 1, seed=number)[0]
        loss = loop(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        is_exact = "queries" not in text or number == 0
        torch.testing.assert_close(step({"ids": ids}), loss.detach(), rtol=0 if is_exact else 1e-5, atol=0)
    step.flush()
    assert step._compiled.peak_bytes <= schedule.device_bytes <= parse_bytes(memory)
    for one, other in zip(loop.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other) if "queries" not in text else (one - other).detach().abs().mean() < 1e-6
