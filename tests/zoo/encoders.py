"""Encoders of text of transformers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from tests.zoo.case import Family, Inputs, Sample, from_config, tokens, varied

# fmt: off

ZOO = Family("encoders")

ENCODER: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32, "type_vocab_size": 2, "pad_token_id": 0}


def encoder(name: str, model: str, *, inputs: Inputs | None = None, **changes: Any) -> None:
    """Adds a model with the common tiny settings and changes to them; None drops a setting."""
    ZOO.transformers(name, model, varied(ENCODER, changes), inputs or tokens(mask="padded"))


encoder("bert", "BertForMaskedLM")
encoder("bert_eager_attention", "BertForMaskedLM", attn_implementation="eager", inputs=tokens(output_attentions=True))
encoder("bert_pooled", "BertModel", inputs=tokens(labels=False))
encoder("roberta", "RobertaForMaskedLM", pad_token_id=1)
encoder("xlm_roberta", "XLMRobertaForMaskedLM", pad_token_id=1)
encoder("albert", "AlbertForMaskedLM", embedding_size=8, num_hidden_groups=1, hidden_dropout_prob=0.1)
encoder("albert_groups", "AlbertForMaskedLM", embedding_size=8, num_hidden_groups=2, inner_group_num=2)
encoder("electra", "ElectraForMaskedLM", embedding_size=8)
encoder("distilbert", "DistilBertForMaskedLM", dim=16, hidden_dim=24, n_layers=3, n_heads=2,
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")))
encoder("mpnet", "MPNetForMaskedLM", pad_token_id=1)
encoder("deberta", "DebertaForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=8)
encoder("deberta_v2", "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"],
    max_relative_positions=8, position_buckets=4, conv_kernel_size=3, share_att_key=True)
encoder("modernbert", "ModernBertForMaskedLM", global_attn_every_n_layers=3, local_attention=4, attention_dropout=0.1)
GROUPS: dict[str, Any] = {f"{part}_groups": 2 for part in ("q", "k", "v", "intermediate", "output")}
encoder("squeezebert", "SqueezeBertForMaskedLM", embedding_size=16, **GROUPS)
encoder("mobilebert", "MobileBertForMaskedLM", intra_bottleneck_size=8, embedding_size=8, true_hidden_size=8)
encoder("convbert", "ConvBertForMaskedLM", embedding_size=8, conv_kernel_size=3, head_ratio=1)
encoder("roformer", "RoFormerForMaskedLM", embedding_size=8)
encoder("fnet", "FNetForMaskedLM", inputs=tokens())
encoder("nystromformer", "NystromformerForMaskedLM", num_landmarks=4, segment_means_seq_len=8, inputs=tokens(length=8))
encoder("megatron_bert", "MegatronBertForMaskedLM")
encoder("esm", "EsmForMaskedLM", position_embedding_type="rotary", mask_token_id=3, token_dropout=True)
encoder("ibert", "IBertForMaskedLM", quant_mode=True, pad_token_id=1)
encoder("longformer", "LongformerForMaskedLM", attention_window=4, pad_token_id=1, inputs=tokens(length=8, mask="ones"))
encoder("longformer_padded", "LongformerForMaskedLM", attention_window=4, pad_token_id=1)
encoder("big_bird", "BigBirdForMaskedLM", block_size=4, num_random_blocks=1, attention_type="block_sparse",
    max_position_embeddings=64, inputs=tokens(length=48))
encoder("big_bird_full", "BigBirdForMaskedLM", attention_type="original_full")
encoder("xlnet", "XLNetLMHeadModel", d_model=16, n_layer=3, n_head=2, d_inner=24, max_position_embeddings=None,
    inputs=tokens())
encoder("xlm", "XLMWithLMHeadModel", emb_dim=16, n_layers=2, n_heads=2, inputs=tokens(mask="ones"))
encoder("flaubert_layerdrop", "FlaubertWithLMHeadModel", emb_dim=16, n_layers=2, n_heads=2, layerdrop=0.2,
    inputs=tokens())
encoder("funnel", "FunnelForMaskedLM", block_sizes=[1, 1], num_decoder_layers=1, d_model=16, n_head=2, d_head=8,
    d_inner=24, **dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads")))
REFORMER = ENCODER | dict(is_decoder=True, attn_layers=["local", "lsh"], attention_head_size=8,
    local_attn_chunk_length=4, lsh_attn_chunk_length=4, num_buckets=4, num_hashes=1, feed_forward_size=24,
    axial_pos_shape=[4, 4], axial_pos_embds_dim=[8, 8], num_hidden_layers=None, hash_seed=0)


def _reformer() -> nn.Module:
    """A Reformer that seeds itself with the same numbers at each run, not by the clock."""
    model: Any = from_config("ReformerModelWithLMHead", varied(REFORMER, {}))
    for layer in model.reformer.encoder.layers:
        for name in ("attention_seed", "feed_forward_seed"):
            setattr(layer, f"_init_{name}", functools.partial(_reseed, layer, name))
    return model


def _reseed(layer: nn.Module, name: str) -> None:
    setattr(layer, name, 5)
    torch.manual_seed(5)


ZOO.add("reformer", _reformer, tokens(length=16))
encoder("canine", "CanineModel", num_hash_buckets=16, num_hash_functions=2, downsampling_rate=2,
    local_transformer_stride=8, upsampling_kernel_size=2, inputs=tokens(length=16, labels=False))


def _layout(step: int) -> Sample:
    args, kwargs = tokens(mask="padded")(step)
    corner = torch.randint(0, 10, (2, 7, 2))
    return args, kwargs | {"bbox": torch.cat([corner, corner + torch.randint(1, 5, (2, 7, 2))], -1)}


encoder("layoutlm", "LayoutLMForMaskedLM", max_2d_position_embeddings=32, inputs=_layout)


def _answers(step: int) -> Sample:
    args, kwargs = tokens(labels=False, mask="padded")(step)
    return args, kwargs | {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 2 + step])}


encoder("bert_answers", "BertForQuestionAnswering", inputs=_answers)
encoder("splinter", "SplinterForQuestionAnswering", question_token_id=2, inputs=_answers)
encoder("perceiver", "PerceiverForMaskedLM", num_latents=4, d_latents=16, d_model=16, num_self_attends_per_block=2,
    num_self_attention_heads=2, num_cross_attention_heads=2, qk_channels=16, v_channels=16, inputs=lambda step: ((),
    {"inputs": torch.randint(3, 64, (2, 7)), "labels": torch.randint(3, 64, (2, 7))}), max_position_embeddings=7)
