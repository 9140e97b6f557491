"""Encoder-decoders for text of transformers."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Family, Inputs, seq2seq, varied

# fmt: off

ZOO = Family("seq2seq")

T5: dict[str, Any] = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
    "decoder_start_token_id": 0, "pad_token_id": 0, "relative_attention_num_buckets": 8, "use_cache": False}
BART: dict[str, Any] = {"vocab_size": 64, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
    "attention_dropout": 0.1, "use_cache": False}
TEXT = seq2seq()


def t5(name: str, model: str, *, inputs: Inputs = TEXT, **changes: Any) -> None:
    """Adds a model with T5's tiny settings."""
    ZOO.transformers(name, model, varied(T5, changes), inputs)


def bart(name: str, model: str, *, inputs: Inputs = TEXT, **changes: Any) -> None:
    """Adds a model with BART's tiny settings."""
    ZOO.transformers(name, model, varied(BART, changes), inputs)


t5("t5", "T5ForConditionalGeneration")
t5("t5_gated", "T5ForConditionalGeneration", feed_forward_proj="gated-gelu", tie_word_embeddings=False)
t5("t5_cache", "T5ForConditionalGeneration", use_cache=True)
t5("mt5", "MT5ForConditionalGeneration")
t5("umt5", "UMT5ForConditionalGeneration")
t5("longt5", "LongT5ForConditionalGeneration", local_radius=3, encoder_attention_type="local")
t5("longt5_tglobal", "LongT5ForConditionalGeneration", local_radius=3, global_block_size=2,
    encoder_attention_type="transient-global")
SWITCH: dict[str, Any] = {"num_experts": 4, "expert_capacity": 4, "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1, "num_decoder_layers": 2}
t5("switch_transformers", "SwitchTransformersForConditionalGeneration", **SWITCH, router_jitter_noise=0.1)
t5("switch_router_logits", "SwitchTransformersForConditionalGeneration", **SWITCH,
    inputs=seq2seq(output_router_logits=True))
bart("bart", "BartForConditionalGeneration")
bart("bart_layerdrop", "BartForConditionalGeneration", encoder_layerdrop=0.3, decoder_layerdrop=0.3)
bart("mbart", "MBartForConditionalGeneration")
bart("marian", "MarianMTModel", share_encoder_decoder_embeddings=True)
bart("pegasus", "PegasusForConditionalGeneration")
bart("pegasus_x", "PegasusXForConditionalGeneration", num_global_tokens=2, block_size=4, inputs=seq2seq(length=8))
bart("blenderbot", "BlenderbotForConditionalGeneration")
bart("blenderbot_small", "BlenderbotSmallForConditionalGeneration")
bart("plbart", "PLBartForConditionalGeneration")
bart("m2m_100", "M2M100ForConditionalGeneration", encoder_layerdrop=0.0, decoder_layerdrop=0.0)
bart("nllb_moe", "NllbMoeForConditionalGeneration", encoder_layerdrop=0.0, decoder_layerdrop=0.0, num_experts=4,
    expert_capacity=8, encoder_sparse_step=2, decoder_sparse_step=2)
bart("led", "LEDForConditionalGeneration", attention_window=4, max_encoder_position_embeddings=32,
    max_decoder_position_embeddings=32, inputs=seq2seq(length=8))
bart("led_padded", "LEDForConditionalGeneration", attention_window=4, max_encoder_position_embeddings=32,
    max_decoder_position_embeddings=32)
bart("bigbird_pegasus", "BigBirdPegasusForConditionalGeneration", attention_type="original_full")
ZOO.transformers("prophetnet", "ProphetNetForConditionalGeneration", {"vocab_size": 64, "hidden_size": 16,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_encoder_layers": 2, "num_decoder_layers": 2,
    "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2, "max_position_embeddings": 32, "pad_token_id":
    0, "decoder_start_token_id": 0, "use_cache": False, "ngram": 2}, TEXT)
ZOO.transformers("fsmt", "FSMTForConditionalGeneration", {"langs": ["en", "de"], "tie_word_embeddings": False,
    "src_vocab_size": 64, "tgt_vocab_size": 64, **{k: v for k, v in BART.items() if k not in ("vocab_size",
    "use_cache")}, "use_cache": False}, lambda _: ((), {"input_ids": torch.randint(3, 64, (2, 7)), "decoder_input_ids":
    torch.randint(3, 64, (2, 5))}))


def _t5gemma(tf: Any) -> Any:
    part = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": 4,
        "query_pre_attn_scalar": 8,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    decoder = part | {"cross_attention_hidden_size": 16, "use_cache": False}
    return tf.T5GemmaConfig(encoder=part, decoder=decoder, vocab_size=64, pad_token_id=0)


ZOO.transformers("t5gemma", "T5GemmaForConditionalGeneration", _t5gemma, TEXT)


def _encoder_decoder(tf: Any) -> Any:
    part = {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "pad_token_id": 0,
    }
    made = tf.EncoderDecoderConfig.from_encoder_decoder_configs(tf.BertConfig(**part), tf.BertConfig(**part))
    made.decoder_start_token_id, made.pad_token_id = 1, 0
    return made


ZOO.transformers("encoder_decoder", "EncoderDecoderModel", _encoder_decoder, seq2seq(use_cache=False))
