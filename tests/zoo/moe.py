"""Mixtures of experts: routers, their losses collected by hooks, and the ways to run experts."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Family, tokens, varied
from tests.zoo.causal import DECODER

# fmt: off

ZOO = Family("moe")

ROUTED = tokens(mask="ones", output_router_logits=True)
MIXTRAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
QWEN: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12, "mlp_only_layers": [0], "decoder_sparse_step": 1, "head_dim": 8}


def moe(name: str, family: str, *, inputs: Any = ROUTED, **changes: Any) -> None:
    """Adds `<family>ForCausalLM`; the router's logits are returned, so that its loss is part of the model's."""
    ZOO.transformers(name, f"{family}ForCausalLM", varied(DECODER, changes), inputs)


moe("mixtral", "Mixtral", **MIXTRAL)
moe("mixtral_eager", "Mixtral", **MIXTRAL, experts_implementation="eager")
moe("mixtral_batched", "Mixtral", **MIXTRAL, experts_implementation="batched_mm")
moe("mixtral_jitter", "Mixtral", **MIXTRAL, router_jitter_noise=0.1)
moe("mixtral_noaux", "Mixtral", **MIXTRAL, inputs=tokens(mask="padded"))
moe("mixtral_jitter_batched", "Mixtral", **MIXTRAL, router_jitter_noise=0.1, experts_implementation="batched_mm")
moe("qwen2_moe", "Qwen2Moe", **QWEN)
moe("qwen2_moe_batched", "Qwen2Moe", **QWEN, experts_implementation="batched_mm")
moe("qwen3_moe", "Qwen3Moe", **QWEN)
moe("qwen3_moe_eager", "Qwen3Moe", **QWEN, experts_implementation="eager")
moe("qwen3_moe_batched", "Qwen3Moe", **QWEN, experts_implementation="batched_mm")
moe("olmoe", "Olmoe", num_experts=4, num_experts_per_tok=2)
moe("olmoe_batched", "Olmoe", num_experts=4, num_experts_per_tok=2, experts_implementation="batched_mm")
moe("phimoe", "Phimoe", num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.01)
moe("phimoe_batched", "Phimoe", num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.01,
    experts_implementation="batched_mm")

GPT_OSS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
moe("gpt_oss", "GptOss", **GPT_OSS)
moe("gpt_oss_batched", "GptOss", **GPT_OSS, experts_implementation="batched_mm")

DEEPSEEK: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 12, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 4, "n_shared_experts": 1, "num_key_value_heads": 4}
PLAIN = tokens(mask="ones")
moe("deepseek_v3", "DeepseekV3", **DEEPSEEK, inputs=PLAIN)
moe("deepseek_v3_eager", "DeepseekV3", **DEEPSEEK, experts_implementation="eager", inputs=PLAIN)
moe("deepseek_v3_batched", "DeepseekV3", **DEEPSEEK, experts_implementation="batched_mm", inputs=PLAIN)
moe("deepseek_v2_batched", "DeepseekV2", **DEEPSEEK, experts_implementation="batched_mm", inputs=PLAIN)
moe("glm4_moe_batched", "Glm4Moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
    first_k_dense_replace=1, head_dim=8, n_group=1, topk_group=1, experts_implementation="batched_mm", inputs=PLAIN)
moe("granitemoe", "GraniteMoe", num_local_experts=4, num_experts_per_tok=2)
moe("jetmoe", "JetMoe", num_local_experts=4, num_experts_per_tok=2, kv_channels=8, num_attention_heads=None)
DBRX: dict[str, Any] = {"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 32, "attn_config": {"kv_n_heads": 1,
    "clip_qkv": 8, "rope_theta": 10000.0}, "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}}
UNKNOWN = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
moe("dbrx", "Dbrx", **DBRX, **dict.fromkeys((*UNKNOWN, "attention_dropout")))
moe("llama4", "Llama4", inputs=tokens(mask="ones"), intermediate_size_mlp=24, num_local_experts=4,
    num_experts_per_tok=1, interleave_moe_layer_step=2, num_hidden_layers=4, head_dim=4, no_rope_layers=[1, 1, 1, 0],
    attention_chunk_size=4)
moe("ernie4_5_moe", "Ernie4_5_Moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=12, moe_layer_start_index=1)
