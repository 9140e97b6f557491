"""Models of many kinds under transformers' Trainer: text, images, sound, several at once; the stock run's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from tests.integrations.runs import Scenario, assert_streams_as_stock

pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT: dict[str, Any] = {**SMALL, "vocab_size": 64, "max_position_embeddings": 32}
DECODER: dict[str, Any] = {**TEXT, "num_key_value_heads": 1, "pad_token_id": 0, "use_cache": False}
TWO = {"gradient_accumulation_steps": 2}
EVAL = {"eval_strategy": "steps", "eval_steps": 2, "remove_unused_columns": False}
REASSOCIATED = 3e-6
"""As in test_trainer.py: what a model uses twice, with several micro-batches, under SGD."""


def made(kind: str, config: str, **sizes: Any) -> Callable[[], Any]:
    """Makes a model of transformers by the names of its classes."""

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


WORDS = rows(lambda i: {"input_ids": ids(i), "labels": ids(i)})
MASKED = rows(
    lambda i: {
        "input_ids": ids(i), "labels": torch.where(torch.arange(8) % 3 == 0, ids(i), -100),
        "attention_mask": (torch.arange(8) < 5 + i % 4).long(),
    }
)  # fmt: skip
TAGGED = rows(lambda i: {"input_ids": ids(i), "labels": ids(i) % 3})
CHOSEN = rows(lambda i: {"input_ids": torch.stack([ids(i), ids(i + 1)]), "labels": torch.tensor(i % 2)})
SEVERAL = rows(lambda i: {"input_ids": ids(i), "labels": (torch.arange(3) % (1 + i % 3) == 0).float()})
SCORED = rows(lambda i: {"input_ids": ids(i), "labels": torch.tensor(i / 12)})
PAIRED = rows(
    lambda i: {
        "input_ids": ids(i), "attention_mask": torch.ones(8).long(), "labels": ids(i + 3, 6),
        "decoder_input_ids": torch.cat([torch.tensor([1]), ids(i + 3, 5)]),
    }
)  # fmt: skip
IMAGES = rows(lambda i: {"pixel_values": noise(i, 3, 16, 16), "labels": torch.tensor(i % 3)})
MAPS = rows(lambda i: {"pixel_values": noise(i, 3, 32, 32), "labels": (noise(i, 8, 8) > 0).long()})
SOUNDS = rows(lambda i: {"input_values": noise(i, 400), "labels": torch.tensor(i % 3)})
SPOKEN = rows(lambda i: {"input_values": noise(i, 800), "labels": ids(i, 4) % 31 + 1})
SPECTRA = rows(lambda i: {"input_features": noise(i, 8, 40), "labels": ids(i, 6)})
CAPTIONS = rows(
    lambda i: {
        "input_ids": ids(i), "attention_mask": torch.ones(8).long(), "pixel_values": noise(i, 3, 16, 16),
        "return_loss": True,
    }
)  # fmt: skip

VISION: dict[str, Any] = {**SMALL, "image_size": 16, "patch_size": 8}
WAVES: dict[str, Any] = {
    **SMALL, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "vocab_size": 32, "num_labels": 3,
    "classifier_proj_size": 16, "feat_extract_norm": "layer",
}  # fmt: skip
QUIET: dict[str, Any] = {**WAVES, "mask_time_prob": 0.0, "layerdrop": 0.0, "apply_spec_augment": False}
PAIRS: dict[str, Any] = {
    "vocab_size": 64, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
    "use_cache": False,
}  # fmt: skip


def first_token(batch: list[Any]) -> dict[str, torch.Tensor]:
    """As the collator of a model for images and text: `return_loss` is one value of the whole batch."""
    stacked = {k: torch.stack([row[k] for row in batch]) for k in batch[0] if k != "return_loss"}
    return {**stacked, "return_loss": True}  # pyright: ignore


def captions(model: Any) -> Any:
    return {"data_collator": first_token}


def seq2seq(**fields: Any) -> dict[str, Any]:
    return {"kind": Seq2SeqTrainer, "arguments": Seq2SeqTrainingArguments, **fields}


class Norms(nn.Module):
    """A model with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten(),
            nn.Linear(4 * 12 * 12, 3),
        )  # fmt: skip

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.layers(pixel_values)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return (loss, logits)


def experts(**more: Any) -> Callable[[], Any]:
    return made("MixtralForCausalLM", "MixtralConfig", **DECODER, num_local_experts=4, num_experts_per_tok=2, **more)


SCENARIOS: dict[str, Scenario] = {
    "words tagged": Scenario({**TWO, **EVAL}, made("BertForTokenClassification", "BertConfig", **TEXT, num_labels=3),
        TAGGED),
    "words masked": Scenario({**EVAL}, made("BertForMaskedLM", "BertConfig", **TEXT), MASKED),
    "one of two": Scenario(TWO, made("BertForMultipleChoice", "BertConfig", **TEXT), CHOSEN),
    "several labels": Scenario(
        TWO, made("DistilBertForSequenceClassification", "DistilBertConfig", vocab_size=64, dim=16, n_layers=2,
                  n_heads=2, hidden_dim=32, max_position_embeddings=32, num_labels=3,
                  problem_type="multi_label_classification"), SEVERAL,
    ),
    "regression": Scenario(
        {**TWO, **EVAL},
        made("RobertaForSequenceClassification", "RobertaConfig", **TEXT, num_labels=1, pad_token_id=0), SCORED,
    ),
    "electra": Scenario(TWO, made("ElectraForSequenceClassification", "ElectraConfig", **TEXT, embedding_size=8),
        rows(lambda i: {"input_ids": ids(i), "labels": torch.tensor(i % 2)})),
    "modernbert": Scenario(
        TWO, made("ModernBertForSequenceClassification", "ModernBertConfig", **TEXT, pad_token_id=0,
                  attn_implementation="sdpa"),
        rows(lambda i: {"input_ids": ids(i), "labels": torch.tensor(i % 2)}),
    ),
    "deberta": Scenario(
        {}, made("DebertaV2ForSequenceClassification", "DebertaV2Config", **TEXT, relative_attention=True,
                 pos_att_type=["p2c", "c2p"]),
        rows(lambda i: {"input_ids": ids(i), "labels": torch.tensor(i % 2)}),
    ),
    "qwen3": Scenario(TWO, made("Qwen3ForCausalLM", "Qwen3Config", **DECODER, head_dim=8), WORDS),
    "gemma2": Scenario(
        {"optim": "sgd", **TWO}, made("Gemma2ForCausalLM", "Gemma2Config", **DECODER, head_dim=8), WORDS,
        tolerance=REASSOCIATED,
    ),
    "experts": Scenario(TWO, experts(), WORDS),
    "experts, balanced": Scenario({}, experts(output_router_logits=True), WORDS),
    "experts, noisy": Scenario({}, experts(router_jitter_noise=0.1), WORDS),
    "mamba": Scenario({}, made("MambaForCausalLM", "MambaConfig", vocab_size=64, hidden_size=16, num_hidden_layers=2,
        state_size=4, tie_word_embeddings=False, use_cache=False), WORDS),
    "bloom": Scenario({}, made("BloomForCausalLM", "BloomConfig", vocab_size=64, hidden_size=16, n_layer=2, n_head=2,
        use_cache=False), WORDS),
    "opt, layers left out": Scenario(
        {}, made("OPTForCausalLM", "OPTConfig", vocab_size=64, hidden_size=16, word_embed_proj_dim=16, ffn_dim=32,
                 num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32, layerdrop=0.3,
                 use_cache=False), WORDS,
    ),
    "bart": Scenario(
        {**EVAL, "label_smoothing_factor": 0.1}, made("BartForConditionalGeneration", "BartConfig", **PAIRS), PAIRED,
        **seq2seq(),
    ),
    "pegasus, generates": Scenario(
        {**EVAL, "predict_with_generate": True, "generation_max_length": 6},
        made("PegasusForConditionalGeneration", "PegasusConfig", **PAIRS), PAIRED, **seq2seq(),
    ),
    "whisper": Scenario(
        {"optim": "sgd", **EVAL, "predict_with_generate": False},
        made("WhisperForConditionalGeneration", "WhisperConfig", **PAIRS, num_mel_bins=8, max_source_positions=20,
             max_target_positions=16, suppress_tokens=None, begin_suppress_tokens=None), SPECTRA, **seq2seq(),
    ),
    "wav2vec2": Scenario(TWO, made("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **QUIET), SOUNDS),
    "wav2vec2, ctc": Scenario({}, made("Wav2Vec2ForCTC", "Wav2Vec2Config", **QUIET, pad_token_id=0,
        ctc_loss_reduction="mean"), SPOKEN),
    "wav2vec2, masked by numpy": Scenario({}, made("Wav2Vec2ForCTC", "Wav2Vec2Config",
        **{**QUIET, "apply_spec_augment": True, "mask_time_prob": 0.3, "mask_time_length": 2}, pad_token_id=0), SPOKEN),
    "wav2vec2, masked by numpy, accumulation": Scenario(
        TWO, made("Wav2Vec2ForCTC", "Wav2Vec2Config",
        **{**QUIET, "apply_spec_augment": True, "mask_time_prob": 0.3, "mask_time_length": 2}, pad_token_id=0), SPOKEN,
        reason="nothing tells ahead how many random numbers the model draws",
    ),
    "hubert": Scenario({}, made("HubertForSequenceClassification", "HubertConfig", **QUIET), SOUNDS),
    "spectrograms": Scenario(
        TWO, made("ASTForAudioClassification", "ASTConfig", **SMALL, patch_size=8, frequency_stride=8, time_stride=8,
                  num_mel_bins=16, max_length=32, num_labels=3),
        rows(lambda i: {"input_values": noise(i, 32, 16), "labels": torch.tensor(i % 3)}),
    ),
    "deit": Scenario({**TWO, **EVAL}, made("DeiTForImageClassification", "DeiTConfig", **VISION, num_labels=3), IMAGES),
    "convnext": Scenario(TWO, made("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16],
        depths=[1, 1], num_stages=2, num_labels=3, drop_path_rate=0.2), IMAGES),
    "resnet": Scenario({**TWO, **EVAL}, made("ResNetForImageClassification", "ResNetConfig", embedding_size=8,
        hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3), IMAGES),
    "running statistics": Scenario({**TWO, **EVAL}, Norms, IMAGES),
    "swin": Scenario({}, made("SwinForImageClassification", "SwinConfig", image_size=16, patch_size=2, embed_dim=8,
        depths=[2, 1], num_heads=[2, 2], window_size=4, num_labels=3), IMAGES),
    "segments": Scenario({**EVAL}, made("SegformerForSemanticSegmentation", "SegformerConfig", depths=[1, 1],
        hidden_sizes=[8, 16], num_encoder_blocks=2, decoder_hidden_size=8, num_attention_heads=[1, 2],
        sr_ratios=[2, 1], patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2], num_labels=2), MAPS),
    "images masked": Scenario({}, made("ViTMAEForPreTraining", "ViTMAEConfig", **VISION, decoder_hidden_size=16,
        decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=16),
        rows(lambda i: {"pixel_values": noise(i, 3, 16, 16)})),
    "images and captions": Scenario(
        {"remove_unused_columns": False, "per_device_train_batch_size": 3},
        made("CLIPModel", "CLIPConfig", text_config={**TEXT, "projection_dim": 8, "eos_token_id": 2},
             vision_config={**VISION, "projection_dim": 8}, projection_dim=8), CAPTIONS, captions,
    ),
    "a picture's text": Scenario(
        {"remove_unused_columns": False},
        made("VisionEncoderDecoderModel", "VisionEncoderDecoderConfig",
             encoder={"model_type": "vit", **VISION},
             decoder={"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 64,
                      "n_positions": 32, "add_cross_attention": True, "is_decoder": True},
             decoder_start_token_id=1, pad_token_id=0),
        rows(lambda i: {"pixel_values": noise(i, 3, 16, 16), "labels": ids(i, 6)}),
    ),
    "a picture in a chat": Scenario(
        TWO,
        made("LlavaForConditionalGeneration", "LlavaConfig",
             text_config={"model_type": "llama", **DECODER},
             vision_config={"model_type": "clip_vision_model", **VISION},
             image_token_index=63, image_seq_length=4, vision_feature_layer=-1),
        rows(lambda i: {"input_ids": torch.cat([torch.full((4,), 63), ids(i, 4) % 60]), "labels": ids(i),
                        "attention_mask": torch.ones(8).long(), "pixel_values": noise(i, 3, 16, 16)}),
    ),
    "time series": Scenario(
        {}, made("PatchTSTForPrediction", "PatchTSTConfig", num_input_channels=2, context_length=16, patch_length=4,
                 patch_stride=4, d_model=8, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16,
                 prediction_length=4, loss="mse"),
        rows(lambda i: {"past_values": noise(i, 16, 2), "future_values": noise(i + 20, 4, 2)}),
    ),
    "a decision": Scenario(
        {}, made("GPT2ForSequenceClassification", "GPT2Config", vocab_size=64, n_positions=32, n_embd=16, n_layer=2,
                 n_head=2, num_labels=3, pad_token_id=0, use_cache=False),
        rows(lambda i: {"input_ids": ids(i), "labels": torch.tensor(i % 3)}),
    ),
    "next sentence": Scenario(
        {"label_names": ["labels", "next_sentence_label"], **EVAL},
        made("BertForPreTraining", "BertConfig", **TEXT),
        rows(lambda i: {"input_ids": ids(i), "labels": ids(i), "next_sentence_label": torch.tensor(i % 2)}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_model_of_another_kind_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    assert_streams_as_stock(SCENARIOS[name], tmp_path)
