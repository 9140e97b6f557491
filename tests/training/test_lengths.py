"""lengths=: batches of any length in few captures, with the numbers of the batches as they are; else a refusal."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import megatrain
from megatrain.errors import OptionError, TraceError
from megatrain.planning import plan_step
from tests.comparing import assert_same
from tests.draws import draws
from tests.nightly import nightly

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
LENGTHS, LONGEST = 8, 20
ROUNDED = 5e-6
"""Kernels of a product of matrices round otherwise for another number of rows, by some units of fp32's 1.2e-7 for each
of ten products. In 400 random batches, padded by hand in eager, losses and logits differed by 2.7e-7 at most."""
OF_GRADIENTS = 5e-5
"""Attention is nearly uniform at first, so the terms of the gradients of queries and keys nearly cancel, and their
rounding is large beside the sums: 8.8e-6 at most in those batches."""


def llama(kind: Any = LlamaForCausalLM, **more: Any) -> Any:
    torch.manual_seed(0)
    return kind(LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False, **more))


def bert() -> Any:
    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=22)
    )


def gpt2(**more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **more}))


def compiled(model: nn.Module, **options: Any) -> Any:
    return megatrain.compile(copy.deepcopy(model), device="cpu", **{"lengths": LENGTHS, **options})


def num_captures(model: Any) -> int:
    return len(list(model.megatrain._variants))


# -- batches ----------------------------------------------------------------------------------------------------------


def tokens(seed: int, rows: int, length: int) -> torch.Tensor:
    return torch.randint(1, 60, (rows, length), generator=torch.Generator().manual_seed(seed))


def plain(seed: int, sizes: Sequence[int]) -> dict[str, torch.Tensor]:
    """Rows of one length, without a mask."""
    ids = tokens(seed, len(sizes), max(sizes))
    return {"input_ids": ids, "labels": ids.clone()}


def ragged(seed: int, sizes: Sequence[int], *, is_left: bool = False) -> dict[str, torch.Tensor]:
    """Rows of their own lengths, padded to the longest, and at least one with padding."""
    length = max(sizes) + 1
    ascending = torch.arange(length).expand(len(sizes), length)
    mask = (ascending.flip(1) if is_left else ascending) < torch.tensor(sizes)[:, None]
    ids = torch.where(mask, tokens(seed, len(sizes), length), 0)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.where(mask, ids, -100)}


def left(seed: int, sizes: Sequence[int]) -> dict[str, torch.Tensor]:
    return ragged(seed, sizes, is_left=True)


def flattened(seed: int, sizes: Sequence[int]) -> dict[str, torch.Tensor]:
    """Documents one after another in one row, as `DataCollatorWithFlattening` has them."""
    positions = torch.cat([torch.arange(size) for size in sizes])[None]
    ids = tokens(seed, 1, sum(sizes))
    return {"input_ids": ids, "position_ids": positions, "labels": torch.where(positions == 0, -100, ids)}


def by_hand(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same batch with padding, as a collator makes it."""
    length = batch["input_ids"].shape[1]
    count = -length % LENGTHS
    values = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    more = {name: torch.full((len(batch["input_ids"]), count), value) for name, value in values.items()}
    more["position_ids"] = torch.arange(count)[None]
    return {name: torch.cat([tensor, more[name]], 1) for name, tensor in batch.items()}


KINDS = {"plain": plain, "ragged": ragged, "left": left, "flattened": flattened}
micro_batch = st.builds(
    lambda kind, seed, sizes: cast(Any, KINDS[kind])(seed, sizes),
    st.sampled_from(list(KINDS)),
    st.integers(0, 1000),
    st.lists(st.integers(2, LONGEST // 2), min_size=2, max_size=2),
)


# -- the numbers ------------------------------------------------------------------------------------------------------


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Any]) -> torch.Tensor:
    losses: list[torch.Tensor] = []
    for batch in batches:
        loss = model(**batch).loss / len(batches)
        loss.backward()
        losses.append(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return sum(losses[1:], losses[0])


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in nn.Module.named_parameters(model)}


@given(st.lists(st.lists(micro_batch, min_size=1, max_size=2), min_size=1, max_size=2), st.sampled_from([None, "1MiB"]))
@draws(8)
def test_steps_of_ragged_batches_have_the_bits_of_batches_padded_by_hand(steps: Any, memory: str | None) -> None:
    """And the numbers of the batches as they are, but for the rounding of other shapes."""
    own, padded = llama(), llama()
    streamed = compiled(own, memory=memory)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (own, padded, streamed)]
    step = megatrain.TrainStep(streamed, optimizers[2], max_grad_norm=1.0)
    for batches in steps:
        loss = step(list(batches))
        assert_same(eager_step(padded, optimizers[1], [by_hand(b) for b in batches]), loss, "padded by hand")
        assert_same(eager_step(own, optimizers[0], batches), loss, "as it is", tolerance=ROUNDED)
    step.flush()
    assert_same(state(padded), state(streamed.megatrain.model), "padded by hand")
    assert_same(state(own), state(streamed.megatrain.model), "as it is", tolerance=ROUNDED)
    # With a mask, without one, and flattened: three graphs for each multiple.
    assert num_captures(streamed) <= 3 * -(-LONGEST // LENGTHS)


@given(st.lists(micro_batch, min_size=1, max_size=3))
@draws(8)
def test_calls_return_results_and_gradients_of_the_batch(batches: Any) -> None:
    model = llama()
    streamed = compiled(model)
    for batch in batches:
        expected, found, other = model(**batch), streamed(**batch), copy.deepcopy(model)(**by_hand(batch))
        assert found.logits.is_contiguous()
        assert_same(other.logits[:, : batch["input_ids"].shape[1]].contiguous(), found.logits, "padded by hand")
        assert_same(expected.logits, found.logits, "logits", tolerance=ROUNDED)
        sides: list[Any] = []
        for side, result in ((model, expected), (streamed.megatrain.model, found)):
            (result.loss + result.logits[0, -1].sum()).backward()
            sides.append({n: p.grad for n, p in nn.Module.named_parameters(side)})
            nn.Module.zero_grad(side)
        assert_same(sides[0], sides[1], "gradients", tolerance=OF_GRADIENTS)


def test_steps_whose_longest_row_is_as_long_share_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order of micro-batches; a step of shorter rows has one of its own, with less to keep."""
    made: list[str] = []
    scheduled = plan_step.scheduled
    monkeypatch.setattr(plan_step, "scheduled", lambda *a, **k: made.append("") or scheduled(*a, **k))
    own, streamed = llama(), compiled(llama(), memory="1MiB")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (own, streamed)]
    step = megatrain.TrainStep(streamed, optimizers[1], max_grad_norm=1.0)
    lengths, texts = (3, 10, 20), dict[int, str]()
    # Each with whether it is planned.
    first = [((10, 10), True), ((20, 10), True), ((20, 3), True), ((10, 10), False), ((10, 3), True)]
    later = [(sizes, False) for sizes in itertools.product(lengths, lengths)]
    for seed, (sizes, is_planned) in enumerate([*first, ((3, 3), True), *later]):
        made.clear()
        batches = [plain(seed, (size, size)) for size in sizes]
        assert_same(eager_step(own, optimizers[0], batches), step(batches), "loss", tolerance=ROUNDED)
        assert bool(made) == is_planned, f"step {seed}, with rows of {sizes}"
        if seed > len(first):
            assert texts.setdefault(max(sizes), str(step.schedule)) == str(step.schedule)
    assert len(set(texts.values())) == len(lengths), "a step of shorter rows has less to keep"
    step.flush()
    assert_same(state(own), state(streamed.megatrain.model), "weights", tolerance=OF_GRADIENTS)


def own_loss(result: Any, batch: Any) -> torch.Tensor:
    """As users write one: of views of the logits, which must be the batch's."""
    logits = result.logits
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), batch["labels"].reshape(-1))


def test_a_loss_sees_outputs_of_the_batchs_length() -> None:
    model = llama()
    streamed = compiled(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, streamed)]
    step = megatrain.TrainStep(streamed, optimizers[1], loss=own_loss)
    for seed, size in enumerate((3, 5, 12)):
        batch = plain(seed, (size, size))
        step.prepare(batch)
        loss = step(batch)
        expected = own_loss(model(batch["input_ids"]), batch)
        expected.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        assert_same(expected.detach(), loss, "loss", tolerance=ROUNDED)
    step.flush()
    assert_same(state(model), state(streamed.megatrain.model), "weights", tolerance=ROUNDED)
    assert num_captures(streamed) == 2


def whisper() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    more: dict[str, Any] = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 16}
    ids: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    given: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "max_target_positions": 21, "dropout": 0.0}
    return WhisperForConditionalGeneration(WhisperConfig(**given, **sizes, **more, **ids))


def spoken(seed: int, sizes: Sequence[int]) -> dict[str, torch.Tensor]:
    """Pieces of sound of one length, and texts of their own lengths."""
    sounds = torch.randn(len(sizes), 8, 32, generator=torch.Generator().manual_seed(seed))
    return {"input_features": sounds, "labels": ragged(seed, sizes)["labels"]}


@pytest.mark.parametrize(("build", "make"), [(bert, plain), nightly((bert, ragged)), (gpt2, left), (whisper, spoken)])
def test_other_models(build: Callable[[], Any], make: Any) -> None:
    """A mask is made for a model that isn't causal; a bound of positions is as good as a multiple."""
    model = build()
    streamed = compiled(model)
    for seed, sizes in enumerate([(3, 6), (7, 4), (20, 19)]):
        batch = make(seed, sizes)
        expected, found = model(**batch), streamed(**batch)
        assert_same([expected.loss, expected.logits], [found.loss, found.logits], "result", tolerance=ROUNDED)


def test_a_row_alone_needs_no_mask_in_a_causal_model() -> None:
    """So that it has the kernels that eager has: attention without a mask."""
    streamed = compiled(llama())
    batch = plain(0, (5,))
    streamed(**batch, attention_mask=torch.ones(1, 5, dtype=torch.long))
    assert "is_causal=True" in str(streamed.traced)
    with_mask = compiled(bert())
    with_mask(**batch, attention_mask=torch.ones(1, 5, dtype=torch.long))
    assert_same(bert()(**batch).logits, with_mask(**batch).logits, "logits", tolerance=ROUNDED)


def test_a_trial_leaves_no_trace_and_no_number_is_drawn() -> None:
    class Notes(nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.seen.add_(1)
            return F.dropout(x, 0.5)

    streamed = compiled(Mixing(Notes()))
    start = torch.get_rng_state()
    streamed.megatrain.lengths.learn(arguments_of(streamed, plain(0, (5, 5))))
    assert torch.equal(start, torch.get_rng_state())
    assert (streamed.layer.calls, float(streamed.layer.seen)) == (0, 0.0)
    streamed(**plain(0, (5, 5)))
    assert (streamed.layer.calls, float(streamed.layer.seen)) == (1, 1.0)


def arguments_of(streamed: Any, batch: Any) -> Any:
    from megatrain.tracer.arguments import Arguments

    return Arguments.of(streamed.megatrain.model, (), batch)


# -- refusals ---------------------------------------------------------------------------------------------------------


class Mixing(nn.Module):
    """A language model with one more layer over the hidden states of tokens."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer, self.head = nn.Embedding(64, 16), layer, nn.Linear(16, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        made = self.layer(x.mT)
        return F.cross_entropy(self.head(x + made.mT).flatten(0, 1), labels.flatten())


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(-1, keepdim=True)


class Counts(nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(x.shape[-1])
        return x


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.BatchNorm1d(16), r"the first module to differ is `layer` \(BatchNorm1d\)"),
        (nn.Conv1d(16, 16, 3, padding=1), r"the first module to differ is `layer` \(Conv1d\)"),
        (Mean(), r"the first module to differ is `layer` \(Mean\)"),
        (Counts(), "writes its buffer `layer.count` with other values"),
    ],
)
def test_a_model_that_notices_padding_is_refused_by_name(layer: nn.Module, reason: str) -> None:
    streamed = compiled(Mixing(layer))
    step = megatrain.TrainStep(streamed, torch.optim.SGD(streamed.parameters(), lr=0.1))
    for run in (lambda: streamed(**plain(0, (5, 5))), lambda: step(plain(0, (5, 5)))):
        with pytest.raises(TraceError, match=reason):
            run()
    assert not num_captures(streamed), "nothing was captured"


class Takes(nn.Module):
    """Takes any arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 4)

    def forward(self, input_ids: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
        return self.embed(torch.ones(1, 1, dtype=torch.long) if input_ids is None else input_ids)


IDS = torch.ones(2, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({"x": IDS}, "no argument with tokens"),
        ({"input_ids": IDS, "weights": IDS}, r"`weights` \[2, 5\] may have a value for each token"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 5, 5)}, r"`attention_mask` has the shape \[2, 1, 5"),
        ({"input_ids": IDS, "token_type_ids": IDS[:, :3]}, r"`token_type_ids` has the shape \[2, 3\]"),
        ({"input_ids": IDS, "logits_to_keep": 2}, "`logits_to_keep` counts positions from the right end"),
        ({"input_ids": IDS, "past_key_values": (IDS,)}, "`past_key_values"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(batch: Any, reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        compiled(Takes())(**batch)


def test_positions_that_are_counted_are_refused_and_bounds_are_not_passed() -> None:
    """Rotary embeddings of longer rows than usual depend on how long these are."""
    ropes = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    streamed = compiled(llama(rope_parameters=ropes, max_position_embeddings=12))
    streamed(**plain(0, (10, 10)))
    assert next(str(node.meta["spec"]) for node in streamed.traced.inputs) == "i64[2, 12]"
    with pytest.raises(
        TraceError, match=r'a row has 13 tokens, and rope_type="dynamic" depends on this number from 12'
    ):
        streamed(**plain(0, (13, 13)))


def test_wrong_numbers_and_several_processes_are_refused() -> None:
    for wrong in (1, 0, True, 16.0, "1024"):
        with pytest.raises(OptionError, match="lengths="):
            compiled(Takes(), lengths=wrong)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(OptionError, match="lengths=8 is for a process that trains alone"):
            compiled(Takes(), process_group=torch.distributed.group.WORLD)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", list(KINDS))
def test_padding_is_what_a_collator_would_make(kind: str) -> None:
    """Positions of a flattened row start over in its padding; nothing but padding is added."""
    batch = cast(Any, KINDS[kind])(0, (4, 7))
    padded = compiled(llama()).megatrain.padded(arguments_of(compiled(llama()), batch)).arguments
    assert_same(by_hand(batch), dict(zip(padded.names, padded.tensors, strict=True)), kind)


class Leaves(Takes):
    def forward(self, input_ids: torch.Tensor, **more: Any) -> torch.Tensor:
        self.hidden = self.embed(input_ids)
        return self.hidden.sum(-1)


def test_tensors_of_all_tokens_in_attributes_are_refused() -> None:
    with pytest.raises(TraceError, match="leaves a tensor of all tokens in `hidden`"):
        compiled(Leaves())(IDS)


class VarLen(nn.Module):
    """Attention within documents, whose ends are given as flash-attn's kernels get them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.head = nn.Embedding(64, 16), nn.Linear(16, 48), nn.Linear(16, 64)

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        position_ids: torch.Tensor,
        seq_idx: torch.Tensor,
        cu_seq_lens_q: torch.Tensor,
        cu_seq_lens_k: torch.Tensor,
        max_length_q: int,
        max_length_k: int,
    ) -> torch.Tensor:
        x = self.embed(input_ids)
        at = torch.arange(x.shape[1])
        of = torch.searchsorted(cu_seq_lens_q.long(), at, right=True)
        first = cu_seq_lens_k.long()[of - 1]
        sees = (of[:, None] == of[None]) & (at[:, None] >= at[None]) & (at - first < max_length_q)
        sees = sees & (seq_idx[0][:, None] == seq_idx[0][None])
        q, k, v = self.qkv(x + position_ids[..., None].sin()).chunk(3, -1)
        made = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=sees)[:, 0]
        return F.cross_entropy(self.head(made).flatten(0, 1), labels.flatten())


def test_ends_of_documents_repeat_and_the_longest_is_bounded() -> None:
    model = VarLen()
    streamed, one = compiled(model), torch.tensor([0])
    for seed, sizes in enumerate([(3, 4), (2, 2, 2), (8,), (1, 3)]):
        ends = torch.cat([one, torch.tensor(sizes).cumsum(0)]).int()
        documents = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[None].int()
        more = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(sizes), "max_length_k": max(sizes)}
        batch = {**flattened(seed, sizes), "seq_idx": documents, **more}
        assert_same(model(**batch), streamed(**batch), "loss", tolerance=ROUNDED)
    assert num_captures(streamed) == 2, "the batch of three documents has more entries"
