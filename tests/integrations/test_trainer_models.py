"""Models of other kinds, and with odd state, inputs and outputs, under Trainer: the stock run's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from transformers.utils import ModelOutput

from tests.comparing import assert_same
from tests.integrations.runs import (
    EVAL,
    GIVEN,
    POINTS,
    ROWS,
    SAVED,
    TWO,
    Scenario,
    assert_streams_as_stock,
    streamed_kind,
)
from tests.integrations.test_trainer import Plain

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT: dict[str, Any] = {**SMALL, "vocab_size": 64, "max_position_embeddings": 32}
DECODER: dict[str, Any] = {**TEXT, "num_key_value_heads": 1, "pad_token_id": 0, "use_cache": False}
VISION: dict[str, Any] = {**SMALL, "image_size": 16, "patch_size": 8}
WAVES: dict[str, Any] = {
    **SMALL, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "vocab_size": 32, "feat_extract_norm": "layer",
    "layerdrop": 0.0, "apply_spec_augment": True, "mask_time_prob": 0.3, "mask_time_length": 2, "pad_token_id": 0,
}  # fmt: skip
PAIRS: dict[str, Any] = {
    "vocab_size": 64, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
    "use_cache": False,
}  # fmt: skip
SEQ2SEQ: dict[str, Any] = {"kind": Seq2SeqTrainer, "arguments": Seq2SeqTrainingArguments}
WHOLE = {"remove_unused_columns": False}


def made(kind: str, **sizes: Any) -> Callable[[], Any]:
    """Makes a model of transformers, whose configuration has the first part of its name."""
    config = next(
        kind[:end] + "Config" for end in range(len(kind), 0, -1) if hasattr(transformers, kind[:end] + "Config")
    )

    def model() -> Any:
        torch.manual_seed(0)
        return getattr(transformers, kind)(getattr(transformers, config)(**copy.deepcopy(sizes)))

    return model


def rows(make: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    return [make(index) for index in range(12)]


def ids(index: int, length: int = 8) -> torch.Tensor:
    return (torch.arange(length) * 7 + index * 5) % 63 + 1


def noise(index: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(index))


def words(index: int) -> dict[str, Any]:
    return {"input_ids": ids(index), "labels": ids(index)}


CAPTIONS = rows(
    lambda i: {"input_ids": ids(i), "attention_mask": torch.ones(8).long(), "pixel_values": noise(i, 3, 16, 16)}
)
CHATS = rows(
    lambda i: {
        "input_ids": torch.cat([torch.full((4,), 63), ids(i, 4) % 60]), "labels": ids(i),
        "attention_mask": torch.ones(8).long(), "pixel_values": noise(i, 3, 16, 16),
    }
)  # fmt: skip


def with_return_loss(batch: list[Any]) -> dict[str, Any]:
    """As the collator of a model for images and text: `return_loss` is one value of the whole batch."""
    return {**{key: torch.stack([row[key] for row in batch]) for key in batch[0]}, "return_loss": True}


# -- models of one's own ----------------------------------------------------------------------------------------------


def seeded(kind: Callable[[], Any]) -> Callable[[], Any]:
    def make() -> Any:
        torch.manual_seed(0)
        return kind()

    return make


def answer(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@dataclass
class Answer(ModelOutput):
    """A class of outputs of one's own."""

    loss: Any = None
    logits: Any = None
    names: Any = None


class OwnOutputs(Plain):
    """Takes the count of items, and returns a class of its own."""

    accepts_loss_kwargs = True

    def forward(self, x: Any, labels: Any = None, num_items_in_batch: Any = None) -> Any:  # pyright: ignore
        logits = self.layers(x)
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return Answer(loss / (len(x) if num_items_in_batch is None else num_items_in_batch), logits, None)


class NestedInputs(nn.Module):
    """Two towers with a dictionary and a list as inputs; outputs of many kinds, of which some are for the log."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(4, 2)

    def forward(self, pair: Any, parts: Any, labels: Any = None, names: Any = None) -> Any:
        both = self.left(pair["x"]) * self.scale.exp() + self.right(pair["deep"][0])
        found = answer(self.head(both + sum(parts)), labels)
        return {**found, "logits": (found["logits"], both), "parts": {"first": found["loss"].detach(), "none": None}}


def nested(batch: list[Any]) -> dict[str, Any]:
    x = torch.stack([row["x"] for row in batch])
    labels = torch.stack([row["labels"] for row in batch])
    names = [f"row {int(row['x'][0])}" for row in batch]
    return {"pair": {"x": x, "deep": (x.flip(0),)}, "parts": [x * 0.1, x * 0.2], "labels": labels, "names": names}


class Odd(nn.Module):
    """Parameters in lists and dictionaries, of no dimension, unused and frozen; buffers of many kinds."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(2)])
        self.dict = nn.ParameterDict({"a": nn.Parameter(torch.randn(4)), "b": nn.Parameter(torch.tensor(0.5))})
        self.last = nn.Parameter(torch.randn(4, 2))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("count", torch.tensor(0), persistent=False)

    def forward(self, x: Any, labels: Any) -> Any:
        for weight in self.list:
            x = torch.where(self.mask, x @ weight, x) + self.dict["a"]
        self.count += 1
        return answer((x * self.dict["b"] + self.frozen) @ self.last, labels)


SCENARIOS: dict[str, Scenario] = {
    "next sentence": Scenario(
        {"label_names": ["labels", "next_sentence_label"], **EVAL}, made("BertForPreTraining", **TEXT),
        rows(lambda i: {**words(i), "next_sentence_label": torch.tensor(i % 2)}),
    ),
    "experts, balanced, noisy": Scenario(
        {}, made("MixtralForCausalLM", **DECODER, num_local_experts=4, num_experts_per_tok=2,
                 output_router_logits=True, router_jitter_noise=0.1), rows(words),
    ),
    "opt, layers left out": Scenario(
        {}, made("OPTForCausalLM", vocab_size=64, hidden_size=16, word_embed_proj_dim=16, ffn_dim=32,
                 num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32, layerdrop=0.3,
                 use_cache=False), rows(words),
    ),
    "whisper": Scenario(
        {"optim": "sgd", **EVAL, **WHOLE},
        made("WhisperForConditionalGeneration", **PAIRS, num_mel_bins=8, max_source_positions=20,
             max_target_positions=16, suppress_tokens=None, begin_suppress_tokens=None),
        rows(lambda i: {"input_features": noise(i, 8, 40), "labels": ids(i, 6)}), **SEQ2SEQ,
    ),
    "wav2vec2, masked by numpy": Scenario(
        TWO, made("Wav2Vec2ForCTC", **WAVES, ctc_loss_reduction="mean"),
        rows(lambda i: {"input_values": noise(i, 800), "labels": ids(i, 4) % 31 + 1}),
        reason="nothing tells ahead how many random numbers the model draws",
    ),
    "images and captions": Scenario(
        {**WHOLE, "per_device_train_batch_size": 3},
        made("CLIPModel", text_config={**TEXT, "projection_dim": 8, "eos_token_id": 2},
             vision_config={**VISION, "projection_dim": 8}, projection_dim=8),
        CAPTIONS, lambda model: {"data_collator": with_return_loss},
    ),
    "a picture in a chat": Scenario(
        TWO, made("LlavaForConditionalGeneration", text_config={"model_type": "llama", **DECODER},
                  vision_config={"model_type": "clip_vision_model", **VISION}, image_token_index=63,
                  image_seq_length=4, vision_feature_layer=-1), CHATS,
    ),
    "outputs of its own": Scenario({**TWO, **EVAL}, seeded(OwnOutputs), POINTS),
    "nested inputs": Scenario(
        {**TWO, **EVAL, **WHOLE}, seeded(NestedInputs), POINTS, lambda model: {"data_collator": nested}
    ),
    "odd state": Scenario({**TWO, **SAVED}, seeded(Odd), POINTS),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_model_of_another_kind_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    assert_streams_as_stock(SCENARIOS[name], tmp_path)


class TiedByHand(nn.Module):
    """Two layers share a weight, which no configuration knows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Any, labels: Any) -> Any:
        logits = self.head(self.body(self.embedding(input_ids)).relu())
        return answer(logits.flatten(0, 1), labels.flatten())


class Transposed(Plain):
    """A parameter that isn't contiguous, which safetensors refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Parameter(torch.randn(2, 2).t())

    def forward(self, x: Any, labels: Any) -> Any:
        return answer(self.layers(x) @ self.last, labels)


@pytest.mark.parametrize("kind", [Transposed, TiedByHand])
def test_what_the_stock_trainer_refuses_to_save_trains_and_is_refused(kind: Any, tmp_path: Path) -> None:
    found: list[Any] = []
    for streams in (False, True):
        model = seeded(kind)()
        arguments = TrainingArguments(str(tmp_path), **{**GIVEN, "optim": "sgd"})
        options: dict[str, Any] = {"megatrain_transfer": "copy"} if streams else {}
        given = {"model": model, "args": arguments, "train_dataset": ROWS if kind is TiedByHand else POINTS}
        trainer = (streamed_kind(Trainer) if streams else Trainer)(**given, **options)
        trainer.train()
        with pytest.raises((ValueError, RuntimeError)) as refused:
            trainer.save_model(str(tmp_path / "saved"))
        losses = [row.get("loss") for row in trainer.state.log_history]
        found.append((losses, {k: v.detach().clone() for k, v in model.state_dict().items()}, str(refused.value)))
    assert_same(found[1], found[0])
