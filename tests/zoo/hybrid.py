"""State-space models, linear attention, recurrences, and mixtures of those with attention."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Family, Inputs, tokens, varied
from tests.zoo.causal import DECODER

# fmt: off

ZOO = Family("hybrid")
TEXT = tokens()
MASKED = tokens(mask="ones")
ROUTED = tokens(mask="ones", output_router_logits=True)


def hybrid(name: str, model: str, *, inputs: Inputs = TEXT, **changes: Any) -> None:
    """Adds a model with the decoders' tiny settings; None drops one."""
    ZOO.transformers(name, model, varied(DECODER, changes), inputs)


LINEAR: dict[str, Any] = {"linear_conv_kernel_dim": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 8, "layer_types": ["linear_attention",
    "full_attention", "linear_attention"]}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12, "decoder_sparse_step": 1}
NO_ATTENTION = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "attention_dropout", "intermediate_size"))
MAMBA2: dict[str, Any] = {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 4, "expand": 2}

hybrid("qwen3_next", "Qwen3NextForCausalLM", inputs=ROUTED, **LINEAR, **EXPERTS)
hybrid("qwen3_next_batched", "Qwen3NextForCausalLM", inputs=ROUTED, **LINEAR, **EXPERTS,
    experts_implementation="batched_mm")
hybrid("qwen3_5", "Qwen3_5ForCausalLM", inputs=MASKED, **LINEAR)
hybrid("mamba", "MambaForCausalLM", **NO_ATTENTION, state_size=4, conv_kernel=3)
hybrid("mamba_cache", "MambaForCausalLM", **NO_ATTENTION, state_size=4, conv_kernel=3, use_cache=True)
hybrid("mamba2", "Mamba2ForCausalLM", **NO_ATTENTION, **MAMBA2)
hybrid("falcon_mamba", "FalconMambaForCausalLM", **NO_ATTENTION, state_size=4, conv_kernel=3)
hybrid("rwkv", "RwkvForCausalLM", **NO_ATTENTION, attention_hidden_size=16, context_length=32)
hybrid("recurrent_gemma", "RecurrentGemmaForCausalLM", inputs=MASKED, lru_width=16, attention_window_size=4,
    block_types=["recurrent", "recurrent", "attention"])
JAMBA: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
    "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_d_conv": 3, "mamba_dt_rank": 4,
    "use_mamba_kernels": False}
hybrid("jamba", "JambaForCausalLM", inputs=ROUTED, **JAMBA)
hybrid("jamba_batched", "JambaForCausalLM", inputs=ROUTED, **JAMBA, experts_implementation="batched_mm")
hybrid("zamba", "ZambaForCausalLM", inputs=MASKED, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4,
    mamba_dt_rank=4, n_mamba_heads=2, use_mamba_kernels=False, num_hidden_layers=5)
hybrid("zamba2", "Zamba2ForCausalLM", inputs=MASKED, mamba_d_state=4, n_mamba_heads=4, mamba_headdim=8, mamba_ngroups=1,
    chunk_size=4, num_hidden_layers=5, layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "mamba"],
    num_mem_blocks=1, use_mem_rope=True, use_mamba_kernels=False, adapter_rank=4)
hybrid("bamba", "BambaForCausalLM", inputs=MASKED, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=8,
    mamba_d_state=4, mamba_n_groups=1, mamba_chunk_size=4)
hybrid("falcon_h1", "FalconH1ForCausalLM", inputs=MASKED, head_dim=4, mamba_d_ssm=16, mamba_n_heads=4, mamba_d_head=4,
    mamba_d_state=4, mamba_n_groups=1, mamba_chunk_size=4)
hybrid("nemotron_h", "NemotronHForCausalLM", inputs=MASKED, layers_block_type=["mamba", "attention", "mamba"],
    mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=4, n_groups=1, chunk_size=4, head_dim=8, num_hidden_layers=None)
hybrid("granitemoehybrid", "GraniteMoeHybridForCausalLM", inputs=MASKED, layer_types=["mamba", "attention", "mamba"],
    mamba_n_heads=4, mamba_d_head=8, mamba_d_state=4, mamba_n_groups=1, mamba_chunk_size=4, num_local_experts=0,
    shared_intermediate_size=24)
hybrid("lfm2", "Lfm2ForCausalLM", inputs=MASKED, conv_L_cache=3, layer_types=["conv", "full_attention", "conv"])
hybrid("minimax", "MiniMaxForCausalLM", inputs=ROUTED, head_dim=4, block_size=4, num_local_experts=4,
    layer_types=["linear_attention", "full_attention", "linear_attention"], experts_implementation="batched_mm")
hybrid("xlstm", "xLSTMForCausalLM", **NO_ATTENTION, num_heads=2, num_blocks=2, num_hidden_layers=None, chunk_size=16,
    embedding_dim=16, inputs=tokens(length=16, use_cache=False))
hybrid("olmo_hybrid", "OlmoHybridForCausalLM", inputs=MASKED, **{k: v for k, v in LINEAR.items() if k != "head_dim"})
