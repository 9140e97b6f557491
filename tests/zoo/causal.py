"""Decoder-only language models of transformers, dense."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.case import Family, Sample, from_config, tokens, varied

# fmt: off

ZOO = Family("causal")

DECODER: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "attention_dropout": 0.1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
ROTARY = {"rope_theta": 10000.0, "rope_type": "default"}


def causal(name: str, family: str, *, inputs: Any = None, **changes: Any) -> None:
    """Adds `<family>ForCausalLM` with the common tiny settings and changes to them; None drops a setting."""
    model = family if family.endswith("Model") else f"{family}ForCausalLM"
    ZOO.transformers(name, model, varied(DECODER, changes), inputs or tokens(mask="ones"))


causal("llama", "Llama")
causal("llama_attentions", "Llama", attn_implementation="eager", inputs=tokens(output_attentions=True))
causal("llama_tied", "Llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
causal("llama_dynrope", "Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    max_position_embeddings=8, inputs=tokens(length=12))
causal("llama_yarn", "Llama", rope_parameters=ROTARY | {"rope_type": "yarn", "factor": 2.0},
    inputs=tokens(mask="padded"))
causal("qwen2", "Qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1, inputs=tokens(mask="padded"))
causal("qwen3", "Qwen3", head_dim=8)
causal("mistral", "Mistral", sliding_window=4)
causal("mistral_cache", "Mistral", sliding_window=4, use_cache=None, inputs=tokens())
causal("gemma", "Gemma", head_dim=8)
causal("gemma2", "Gemma2", head_dim=8, sliding_window=4, query_pre_attn_scalar=8, attn_implementation="eager")
causal("gemma3", "Gemma3", head_dim=8, sliding_window=4, layer_types=["sliding_attention"] * 2 + ["full_attention"])
causal("phi", "Phi", resid_pdrop=0.1, embd_pdrop=0.1)
causal("phi3", "Phi3", resid_pdrop=0.1, embd_pdrop=0.1)
causal("gpt2", "GPT2LMHeadModel", vocab_size=64, n_embd=16, n_layer=3, n_head=2, n_positions=32, attention_dropout=None)
causal("opt", "OPT", hidden_size=16, ffn_dim=24, word_embed_proj_dim=16, dropout=0.1, layerdrop=0.0)
causal("opt_layerdrop", "OPT", hidden_size=16, ffn_dim=24, word_embed_proj_dim=16, dropout=0.1, layerdrop=0.3)
causal("bloom", "Bloom", n_layer=3, n_head=4, hidden_dropout=0.1)
causal("falcon", "Falcon", hidden_dropout=0.1, inputs=tokens(mask="padded"))
causal("falcon_alibi", "Falcon", alibi=True, new_decoder_architecture=False, hidden_dropout=0.1)
causal("gpt_neo", "GPTNeo", num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
    num_hidden_layers=None, window_size=4)
causal("gpt_neox", "GPTNeoX", hidden_dropout=0.1, rotary_pct=0.5)
causal("gptj", "GPTJ", n_embd=16, n_layer=3, n_head=2, n_positions=32, rotary_dim=4, attention_dropout=None)
causal("codegen", "CodeGen", n_embd=16, n_ctx=32, n_layer=3, n_head=4, n_positions=32, rotary_dim=4)
causal("gpt_bigcode", "GPTBigCode", n_embd=16, n_layer=3, n_head=2, n_positions=32)
causal("olmo2", "Olmo2")
causal("granite", "Granite", residual_multiplier=0.5, embedding_multiplier=2.0, logits_scaling=2.0)
causal("cohere", "Cohere", logit_scale=0.5, use_qk_norm=True)
causal("cohere2", "Cohere2", sliding_window=4, head_dim=4)
causal("stablelm", "StableLm", hidden_dropout=0.1, use_qkv_bias=True, partial_rotary_factor=0.5)
causal("starcoder2", "Starcoder2", residual_dropout=0.1, embedding_dropout=0.1, sliding_window=4)
causal("mpt", "Mpt", d_model=16, n_heads=2, n_layers=3, max_seq_len=32)
causal("persimmon", "Persimmon", hidden_dropout=0.1)
causal("glm4", "Glm4", head_dim=4)
causal("nemotron", "Nemotron", hidden_dropout=0.1)
causal("smollm3", "SmolLM3", no_rope_layers=[1, 0, 1])
causal("exaone4", "Exaone4", sliding_window=4, layer_types=["sliding_attention", "full_attention", "full_attention"])
causal("ctrl", "CTRLLMHeadModel", n_embd=16, dff=24, n_layer=2, n_head=2, n_positions=32)
causal("xglm", "XGLM", d_model=16, ffn_dim=24, num_layers=3, attention_heads=2, layerdrop=0.0)
causal("biogpt", "BioGpt", hidden_dropout_prob=0.1, layerdrop=0.0)
causal("openai_gpt", "OpenAIGPTLMHeadModel", n_embd=16, n_layer=3, n_head=2, n_positions=32)


def _checkpointed(use_reentrant: bool) -> nn.Module:
    model: Any = from_config("LlamaForCausalLM", DECODER)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return model


ZOO.add("llama_gc", lambda: _checkpointed(False), tokens(mask="ones"))
ZOO.add("llama_gc_reentrant", lambda: _checkpointed(True), tokens(mask="ones"))


def _classified(step: int) -> Sample:
    args, kwargs = tokens(labels=False)(step)
    return args, kwargs | {"labels": torch.randint(0, 3, (2,))}


ZOO.transformers("llama_seqcls", "LlamaForSequenceClassification", DECODER | {"num_labels": 3}, _classified)
