"""Generating through a compiled model: the plain model's tokens and logits, with weights that stream in a budget."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    StaticCache,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import megatrain
from megatrain.errors import ExecuteError, TraceError
from tests.comparing import assert_same, assert_same_state
from tests.gradients import grad_of
from tests.integrations.runs import fast_or_nightly
from tests.tools.models import IDS, llama, values

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

TIGHT = 64 << 10
"""Of a larger model."""
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
CODER: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 63, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
SUPPRESSED: dict[str, Any] = {"suppress_tokens": None, "begin_suppress_tokens": None}


def whisper() -> Any:
    config = WhisperConfig(**CODER, **SUPPRESSED, num_mel_bins=8, max_source_positions=8, max_target_positions=32)
    return WhisperForConditionalGeneration(config)


MAKES: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32)),
    "whisper": whisper,
    "mamba": lambda: MambaForCausalLM(MambaConfig(**SIZES, state_size=4)),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return MAKES[name]().eval()


def compiled_of(model: Any, memory: int | str | None = TIGHT, **options: Any) -> Any:
    return megatrain.compile(model, device="cpu", memory=memory, recording=megatrain.Recording(), **options)


def generated(model: Any, inputs: Any = IDS, **options: Any) -> Any:
    torch.manual_seed(7)
    given = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(inputs, output_logits=True, return_dict_in_generate=True, **given)


def assert_generates_alike(compiled: Any, eager: Any, inputs: Any = IDS, **options: Any) -> Any:
    """Compares tokens and logits by their bits; returns the figures of the walk."""
    expected, found = (generated(model, inputs, **options) for model in (eager, compiled))
    assert torch.equal(found.sequences, expected.sequences)
    assert_same(list(found.logits), list(expected.logits))
    return compiled.megatrain.walks.latest


def streamed_keys(compiled: Any) -> list[str]:
    """What was copied to the device, in order."""
    return [e.label.removeprefix("W ") for e in compiled.megatrain._recording.issued if e.stream == "h2d"]


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "no cache": {"use_cache": False},
    "sampled": {"do_sample": True, "top_k": 8, "temperature": 0.9},
    "sampled beams": {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
    "static cache": {"cache_implementation": "static"},
    "offloaded cache": {"cache_implementation": "offloaded"},
    "left padding": {"attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])},
}


@pytest.mark.parametrize("way", fast_or_nightly(WAYS, ("sampled beams",)))
def test_tokens_and_logits_are_the_plain_models_within_a_tight_budget(way: str):
    eager, model = llama(), llama()
    nbytes = sum(p.nbytes for p in model.parameters())
    compiled = compiled_of(model, 128 << 10 if "beams" in way else TIGHT)
    figures = assert_generates_alike(compiled, eager, **WAYS[way])
    assert figures.peak_bytes <= figures.budget_bytes
    assert compiled.peak_bytes == figures.peak_bytes
    assert figures.h2d_bytes > 2 * nbytes
    keys = streamed_keys(compiled)
    assert len(keys) == figures.num_prefetches
    assert set(keys) == {*dict(model.named_parameters()), "model.rotary_emb.inv_freq"}
    assert_same_state(compiled, eager)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in MAKES if name != "llama"])
def test_models_of_every_kind_of_cache(name: str):
    model = made(name)
    eager = copy.deepcopy(model)
    inputs = torch.randn(2, 8, 16) if name == "whisper" else IDS
    figures = assert_generates_alike(compiled_of(model, 400 << 10), eager, inputs, num_beams=2)
    assert figures.peak_bytes <= 400 << 10
    assert figures.num_prefetches > len(list(model.parameters()))


# -- between training steps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_weights_are_those_of_the_latest_step(overlap: bool):
    eager, compiled = llama(), compiled_of(llama(), "256KiB")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (eager, compiled)]
    step = megatrain.TrainStep(compiled, optimizers[1], max_grad_norm=0.1, overlap=overlap)
    seen: list[torch.Tensor] = []
    for number in range(2):
        batch = {"input_ids": (IDS + number) % 64, "labels": IDS, "use_cache": False}
        eager(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.1)
        optimizers[0].step()
        optimizers[0].zero_grad()
        step(batch)
        assert_generates_alike(compiled, eager, do_sample=True)
        seen.append(generated(compiled).logits[0])
    assert not torch.equal(seen[0], seen[1])
    assert_same(values(compiled), values(eager))


def test_new_values_and_new_memory_of_a_parameter_are_seen():
    eager, compiled = llama(), compiled_of(llama())
    generated(compiled)
    for model in (eager, compiled):
        with torch.no_grad():
            model.lm_head.weight.mul_(-2)
        model.model.norm.weight.data = torch.linspace(0, 2, 32)
    assert_generates_alike(compiled, eager)


# -- calls with a cache ----------------------------------------------------------------------------------------------


def caches(model: Any) -> list[Any]:
    return [DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=16)]


def contents(cache: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in vars(layer).items() if k != "device"} for layer in cache.layers]


@pytest.mark.parametrize(
    ("index", "is_one_walk"),
    [(0, False), pytest.param(1, True, marks=pytest.mark.nightly)],
    ids=["dynamic", "static, one walk"],
)
@torch.no_grad()
def test_a_call_leaves_in_the_callers_cache_what_the_plain_model_leaves(index: int, is_one_walk: bool):
    eager, compiled = llama(), compiled_of(llama())
    kept = [caches(model)[index] for model in (eager, compiled)]

    def decode(model: Any, cache: Any) -> list[torch.Tensor]:
        results = [model(IDS, past_key_values=cache, use_cache=True)]
        results += [model(IDS[:, :1] + n, past_key_values=cache, use_cache=True) for n in range(3)]
        assert all(result.past_key_values is cache for result in results)
        return [result.logits for result in results]

    expected = decode(eager, kept[0])
    if is_one_walk:
        with compiled.megatrain.walk():
            found = decode(compiled, kept[1])
    else:
        found = decode(compiled, kept[1])
    assert_same(found, expected)
    assert kept[0].get_seq_length() == kept[1].get_seq_length() == 11
    for mine, its in zip(contents(kept[1]), contents(kept[0]), strict=True):
        assert mine.keys() == its.keys()
        assert_same([v for v in mine.values() if isinstance(v, torch.Tensor)], [
            v for v in its.values() if isinstance(v, torch.Tensor)
        ])  # fmt: skip
        plain = [{k: v for k, v in each.items() if not isinstance(v, torch.Tensor)} for each in (mine, its)]
        assert plain[0] == plain[1]


@torch.no_grad()
def test_the_cache_of_a_captured_call_goes_on_in_a_walk():
    eager, compiled = llama(), compiled_of(llama(), "256KiB")
    first = [model(IDS, use_cache=True) for model in (eager, compiled)]
    second = [
        model(IDS[:, :1], past_key_values=result.past_key_values)
        for model, result in zip((eager, compiled), first, strict=True)
    ]
    assert torch.equal(second[0].logits, second[1].logits)
    assert compiled.megatrain.walks.latest.what == "the call"


class Boxed:
    """A cache that torch knows how to take apart, as some are registered for export."""

    def __init__(self, kept: list[torch.Tensor]) -> None:
        self.kept = kept


class Remembers(nn.Module):
    """Adds what it has seen before, and keeps the new."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, box: Any) -> torch.Tensor:
        kept = box.kept if isinstance(box, Boxed) else box
        x = self.layer(x) + sum(kept, torch.zeros(4))
        kept.append(x)
        return x


def keyed(box: Boxed) -> Any:
    return [(pytree.SequenceKey(i), t) for i, t in enumerate(box.kept)], None


pytree.register_pytree_node(
    Boxed, lambda box: (box.kept, None), lambda kept, _: Boxed(list(kept)), flatten_with_keys_fn=keyed
)


def test_an_object_that_torch_takes_apart_is_still_the_callers():
    torch.manual_seed(0)
    model, x = Remembers(), torch.ones(2, 4)
    eager, compiled = copy.deepcopy(model), compiled_of(model, "1MiB")
    boxes = Boxed([]), Boxed([])
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(compiled(x, boxes[1]), eager(x, boxes[0]))
    assert len(boxes[1].kept) == 3
    assert_same(boxes[1].kept, boxes[0].kept)
    with pytest.raises(TraceError, match=r"(?s)changes its argument `1`, a Boxed\..*compiled\.megatrain\.walk\(\)"):
        compiled(x, boxes[1])
    with pytest.raises(TraceError, match="changes its argument `box`, a list"):
        compiled(x, box=[])


class Pipeline(nn.Module):
    """Its modules pass one dictionary on, as those of sentence-transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features["hidden"] = torch.tanh(self.first(features["x"]))
        features.update({"result": self.second(features["hidden"])})
        features.pop("unused", None)
        return features


@pytest.mark.parametrize("by_name", [False, True])
def test_a_dictionary_that_is_changed_and_returned_is_the_callers(by_name: bool):
    torch.manual_seed(0)
    model = Pipeline()
    eager, compiled = copy.deepcopy(model), compiled_of(model, "1MiB")
    for step in range(3):
        x, unused = torch.randn(2, 4), torch.ones(())
        given = [{"x": x, "unused": unused, "kept": "text"} for _ in range(2)]
        found = [
            side(features=own) if by_name else side(own) for side, own in zip((eager, compiled), given, strict=True)
        ]
        assert found[1] is given[1]
        assert list(given[1]) == list(given[0]) == ["x", "kept", "hidden", "result"]
        assert given[1]["x"] is x
        assert torch.equal(given[1]["result"], given[0]["result"])
        for one in found:
            (one["result"].square().mean() + one["hidden"].mean()).backward()
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(grad_of(mine), grad_of(theirs)), step
            mine.data.mul_(0.9)
            theirs.data.mul_(0.9)
    assert "returns its argument" in str(compiled.megatrain.traced)


def test_a_cache_where_gradients_are_wanted_is_refused():
    compiled = compiled_of(llama())
    cache = DynamicCache(config=compiled.config)
    with pytest.raises(TraceError, match=r"(?s)`past_key_values` is a DynamicCache.*torch\.no_grad\(\)"):
        compiled(IDS, past_key_values=cache)
    assert cache.get_seq_length() == 0


# -- models of our own -----------------------------------------------------------------------------------------------


class Own(nn.Module):
    """Calls its parts by itself; writes buffers, by a view too; keeps a view of a weight while others come and go."""

    total: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.norm = nn.BatchNorm1d(16)
        self.frozen = nn.Parameter(torch.zeros(16), requires_grad=False)
        self.register_buffer("total", torch.zeros(2, 16))
        self.register_buffer("table", torch.zeros(4))
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.layers[0].weight.t()  # pyright: ignore
        row = self.total[1]
        for layer in self.layers:
            x = self.norm(layer(x)).sin()
        row += x[0]
        self.frozen.add_(x[1])
        self.table = self.table + x.mean()
        return x @ early + self.total[1] + self.frozen

    @torch.no_grad()
    def generate(self, x: torch.Tensor, steps: int = 3) -> torch.Tensor:
        self.seen.append((self.frozen.device, self.frozen.shape, self.layers[0].weight.is_leaf))  # pyright: ignore
        for _ in range(steps):
            x = self(x)
        return x


def own() -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = Own()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("memory", ["4KiB", pytest.param("1MiB", marks=pytest.mark.nightly)])
def test_buffers_that_a_walk_writes_are_the_models(memory: str):
    model, eager = own()
    compiled = compiled_of(model, memory)
    for number in range(3):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number))
        assert torch.equal(compiled.generate(x), eager.generate(x))
        assert_same(values(model), values(eager))
    assert model.seen == eager.seen


class Unseen(nn.Module):
    """Writes where no version counts it."""

    def __init__(self, write: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.write, self.linear = write, nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(4))

    def forward(self, x: torch.Tensor, unused: object = None) -> torch.Tensor:
        x = self.linear(x) + self.steps
        self.write(self.steps)  # pyright: ignore[reportArgumentType]
        return x * self.get_buffer("steps")


UNSEEN: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda tensor: tensor.data.add_(1),
    "an element of data": lambda tensor: tensor.data[1:].fill_(float(tensor.sum()) + 1),
    "numpy": lambda tensor: tensor.numpy().__iadd__(1),
}


@pytest.mark.parametrize(("write", "is_one_walk"), [*((name, False) for name in UNSEEN), ("data", True)])
def test_writes_that_no_version_counts_are_the_models(write: str, is_one_walk: bool):
    torch.manual_seed(0)
    model = Unseen(UNSEEN[write])
    eager, compiled = copy.deepcopy(model), compiled_of(model, "1MiB")
    with torch.no_grad(), compiled.megatrain.walk() if is_one_walk else nullcontext():
        for _ in range(3):
            x = torch.randn(2, 4)
            assert torch.equal(compiled(x, object()), eager(x))
    assert_same(values(model), values(eager))


def test_a_write_that_no_version_counts_into_a_trained_parameter_is_refused():
    model = Unseen(lambda _: model.linear.weight.data.mul_(2))
    before, compiled = values(model), compiled_of(model, "1MiB")
    with torch.no_grad(), pytest.raises(ExecuteError, match=r"the model writes into its parameter `linear\.weight`"):
        compiled(torch.randn(2, 4), object())
    assert_same(values(model), before)


@pytest.mark.parametrize("key", ["steps", "linear.weight"])
def test_new_memory_for_state_is_refused_in_a_walk(key: str):
    def assign(_: torch.Tensor) -> None:
        tensor = model.get_buffer(key) if key == "steps" else model.get_parameter(key)
        tensor.data = torch.ones(tensor.shape)

    model = Unseen(assign)
    compiled = compiled_of(model, "1MiB")
    with torch.no_grad(), pytest.raises(ExecuteError, match=f"the model gives `{key}` new memory"):
        compiled(torch.randn(2, 4), object())


def test_what_a_walk_computes_on_the_device_and_refuses():
    model, eager = own()
    compiled = compiled_of(model)
    step = megatrain.TrainStep(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1), loss=lambda out, _: out.sum())
    x = torch.randn(2, 16)
    with compiled.megatrain.walk():
        with pytest.raises(ExecuteError, match=r"(?s)has no gradients.*torch\.no_grad"):
            compiled.layers[0](x)
        with pytest.raises(ExecuteError, match="while the model runs"):
            step(x)
        before = len(streamed_keys(compiled))
        with torch.no_grad():
            found = compiled.layers[3](x), F.linear(compiled.layers[0].weight, compiled.layers[1].weight)
    assert streamed_keys(compiled)[before : before + 2] == ["layers.3.weight", "layers.3.bias"]
    with torch.no_grad():
        assert torch.equal(found[0], eager.layers[3](x))
        assert torch.equal(found[1], F.linear(eager.layers[0].weight, eager.layers[1].weight))


def test_a_call_that_fails_leaves_the_model_as_it_was():
    model, eager = own()
    compiled = compiled_of(model, "4KiB")
    x = torch.randn(4, 16)
    handles = [m.layers[4].register_forward_hook(lambda *_: 1 / 0) for m in (model, eager)]
    for each in (compiled, eager):
        with pytest.raises(ZeroDivisionError):
            each.generate(x)
    for handle in handles:
        handle.remove()
    assert_same(values(model), values(eager))
    assert torch.equal(compiled.generate(x), eager.generate(x))
    loss, other = compiled.layers[0].weight.sum(), eager.layers[0].weight.sum()
    assert torch.equal(loss, other)


def test_a_budget_that_is_too_small_is_refused_with_figures():
    compiled = compiled_of(llama(), 30 << 10)
    with pytest.raises(ExecuteError) as caught:
        generated(compiled)
    assert_expected_inline(
        str(caught.value),
        """\
generate() needs more device memory than the budget of 30.00 KiB, for what the model has computed.
  30.75 KiB are held by inputs, results and caches, 0 B by weights in use, 0 B by earlier calls.
  Give a larger memory=, a smaller batch, fewer tokens, or a cache that stays on the host.""",
    )
    compiled = compiled_of(llama(), 4 << 10)
    with pytest.raises(
        ExecuteError, match=r"generate\(\) needs more device memory .* for `model\.embed_tokens\.weight`"
    ):
        generated(compiled)


class _AfterPrefix(nn.Module):
    """A model after a prefix, whose keys and values it is given as tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, prefix: Any) -> torch.Tensor:
        cache = DynamicCache()
        for number, layer in enumerate(prefix):
            cache.update(*layer, number)
        return self.model(input_ids=input_ids, labels=labels, past_key_values=cache).loss


@pytest.mark.nightly
def test_a_cache_that_comes_as_tensors_has_gradients():
    eager, streamed = _AfterPrefix(llama()), _AfterPrefix(llama())
    compiled = compiled_of(streamed, "256KiB")
    with torch.no_grad():
        layers = eager.model(input_ids=IDS, use_cache=True).past_key_values.layers
    prefixes: list[list[tuple[torch.Tensor, ...]]] = []
    for module in (eager, compiled):
        prefixes.append([tuple(t.clone().requires_grad_() for t in (each.keys, each.values)) for each in layers])
        module(IDS, IDS, prefixes[-1]).backward()
    assert len(compiled.program.blocks) > 1
    for (name, one), other in zip(eager.named_parameters(), streamed.parameters(), strict=True):
        assert torch.equal(grad_of(one), grad_of(other)), name
    for one, other in zip(*([t for pair in prefix for t in pair] for prefix in prefixes), strict=True):
        assert torch.equal(grad_of(one), grad_of(other))
    with pytest.raises(TraceError, match=r"is a DynamicCache.*with tensors in it(.|\n)*Pass the tensors themselves"):
        compiled_of(llama())(input_ids=IDS, past_key_values=DynamicCache([(each.keys, each.values) for each in layers]))
