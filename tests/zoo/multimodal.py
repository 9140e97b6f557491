"""Models of text together with images."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Family, Sample
from tests.zoo.causal import DECODER

# fmt: off

ZOO = Family("multimodal")

TEXT: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "image_size": 8, "patch_size": 4, "attention_dropout": 0.1}
LLM = {k: v for k, v in DECODER.items() if k != "use_cache"}


def _pairs(_: int) -> Sample:
    ids = torch.randint(3, 64, (2, 6))
    ids[:, -1] = 2
    return (), {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8), "return_loss": True}


def _two(config: str, **more: Any) -> Any:
    return lambda tf: getattr(tf, config)(text_config=TEXT, vision_config=IMAGE, **({"projection_dim": 8} | more))


ZOO.transformers("clip", "CLIPModel", _two("CLIPConfig"), _pairs)
ZOO.transformers("chinese_clip", "ChineseCLIPModel", _two("ChineseCLIPConfig"), _pairs)
ZOO.transformers("altclip", "AltCLIPModel", lambda tf: tf.AltCLIPConfig(text_config=TEXT | {"project_dim": 16,
    "pad_token_id": 1}, vision_config=IMAGE, projection_dim=16), _pairs)
ZOO.transformers("siglip", "SiglipModel", lambda tf: tf.SiglipConfig(text_config=TEXT | {"max_position_embeddings": 6},
    vision_config=IMAGE), _pairs)
ZOO.transformers("clipseg", "CLIPSegForImageSegmentation", lambda tf: tf.CLIPSegConfig(text_config=TEXT,
    vision_config=IMAGE, projection_dim=16, reduce_dim=8, extract_layers=[0, 1], decoder_num_attention_heads=2,
    decoder_intermediate_size=16), lambda step: ((), {k: v for k, v in _pairs(step)[1].items() if k != "return_loss"}))
ZOO.transformers("blip", "BlipForConditionalGeneration", lambda tf:
    tf.BlipConfig(text_config=TEXT | {"encoder_hidden_size": 16, "num_attention_heads": 2, "projection_dim": 8,
    "sep_token_id": 2}, vision_config=IMAGE, projection_dim=8, image_text_hidden_size=8), lambda step: ((),
    {"input_ids": _pairs(step)[1]["input_ids"], "pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.randint(3, 64,
    (2, 6))}))
ZOO.transformers("blip_2", "Blip2ForConditionalGeneration", lambda tf: tf.Blip2Config(vision_config=IMAGE,
    qformer_config=TEXT | {"encoder_hidden_size": 16, "cross_attention_frequency": 1}, text_config={"model_type": "opt",
    "ffn_dim": 24, "word_embed_proj_dim": 16, "layerdrop": 0.0} | TEXT, num_query_tokens=2, image_token_index=60),
    lambda step: _with_image(step, 60, 2))
ZOO.transformers("git", "GitForCausalLM", lambda tf: tf.GitConfig(vision_config=IMAGE, **TEXT), lambda step: ((),
    {"input_ids": torch.randint(3, 64, (2, 6)), "pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.randint(3, 64,
    (2, 6)), "use_cache": False}))
ZOO.transformers("vilt", "ViltModel", lambda tf: tf.ViltConfig(**TEXT, image_size=8, patch_size=4), lambda step: ((),
    {"input_ids": torch.randint(3, 64, (2, 6)), "pixel_values": torch.randn(2, 3, 8, 8)}))
ZOO.transformers("visual_bert", "VisualBertForPreTraining", lambda tf: tf.VisualBertConfig(**TEXT,
    visual_embedding_dim=8), lambda step: ((), {"input_ids": torch.randint(3, 64, (2, 6)), "visual_embeds":
    torch.randn(2, 3, 8), "visual_attention_mask": torch.ones(2, 3), "attention_mask": torch.ones(2, 6)}))
ZOO.transformers("vision_encoder_decoder", "VisionEncoderDecoderModel", lambda tf: _image_to_text(tf), lambda step: ((),
    {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.randint(3, 64, (2, 5)), "use_cache": False}))
ZOO.transformers("owlvit", "OwlViTModel", _two("OwlViTConfig"), _pairs)
ZOO.transformers("flava", "FlavaModel", lambda tf: tf.FlavaConfig(text_config=TEXT, image_config=IMAGE,
    multimodal_config=IMAGE, hidden_size=16, projection_dim=8), lambda step: ((), {"input_ids": torch.randint(3, 64, (2,
    6)), "pixel_values": torch.randn(2, 3, 8, 8)}))
ZOO.transformers("groupvit", "GroupViTModel", lambda tf: tf.GroupViTConfig(text_config=TEXT,
    vision_config={"hidden_size": 16, "intermediate_size": 24, "depths": [1, 1, 1], "num_group_tokens": [4, 2, 0],
    "num_output_groups": [4, 2, 0], "num_attention_heads": 2, "image_size": 16, "patch_size": 4}, projection_dim=8,
    projection_intermediate_dim=16), lambda step: ((), _pairs(step)[1] | {"pixel_values": torch.randn(2, 3, 16, 16)}))


def _image_to_text(tf: Any) -> Any:
    made = tf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(tf.ViTConfig(**IMAGE), tf.GPT2Config(
        vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32))
    made.decoder_start_token_id, made.pad_token_id = 1, 0
    return made


def _with_image(step: int, token: int, count: int, **more: Any) -> Sample:
    """Text with a run of image tokens, at another place each step."""
    ids = torch.randint(3, 50, (2, count + 6))
    ids[:, 1 + step : 1 + step + count] = token
    given = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8), "use_cache": False}
    return (), given | {"attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(ids == token, -100)} | more


ZOO.transformers("llava", "LlavaForConditionalGeneration", lambda tf: tf.LlavaConfig(text_config={"model_type":
    "llama"} | LLM, vision_config={"model_type": "clip_vision_model"} | IMAGE, image_token_index=60), lambda step:
    _with_image(step, 60, 4))
ZOO.transformers("paligemma", "PaliGemmaForConditionalGeneration", lambda tf:
    tf.PaliGemmaConfig(text_config={"model_type": "gemma", "head_dim": 8} | LLM, image_token_index=60,
    projection_dim=16, vision_config={"model_type": "siglip_vision_model", "projection_dim": 16} | IMAGE), lambda step:
    _with_image(step, 60, 4, token_type_ids=torch.ones(2, 10, dtype=torch.int64)))
ZOO.transformers("internvl", "InternVLForConditionalGeneration", lambda tf: tf.InternVLConfig(text_config={"model_type":
    "qwen2"} | LLM, vision_config=IMAGE | {"image_size": [8, 8], "patch_size": [2, 2]}, image_token_id=60), lambda step:
    _with_image(step, 60, 4))
ZOO.transformers("gemma3_vision", "Gemma3ForConditionalGeneration", lambda tf: tf.Gemma3Config(text_config={"head_dim":
    8, "sliding_window": 4} | LLM, vision_config=IMAGE, mm_tokens_per_image=4, image_token_index=60, boi_token_index=61,
    eoi_token_index=62), lambda step: _with_image(step, 60, 4, token_type_ids=torch.zeros(2, 10, dtype=torch.int64)))


def _qwen_inputs(step: int) -> Sample:
    """One image of 4 by 4 patches, merged two by two; then one of another shape."""
    height, width = ((4, 4), (2, 8))[step]
    ids = torch.randint(3, 50, (1, 10))
    ids[0, 1], ids[0, 2:6], ids[0, 6] = 57, 60, 58
    kinds = (ids == 60).long()
    return (), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(16,
    3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, height, width]]), "labels": ids.masked_fill(ids >= 57, -100),
        "use_cache": False, "mm_token_type_ids": kinds}


QWEN: dict[str, Any] = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 57, "vision_end_token_id":
    58}
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0}
ZOO.transformers("qwen2_vl", "Qwen2VLForConditionalGeneration", lambda tf:
    tf.Qwen2VLConfig(text_config=LLM | {"rope_parameters": MROPE}, vision_config={"depth": 2, "embed_dim": 16,
    "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4, "temporal_patch_size": 2}, **QWEN),
    _qwen_inputs)
ZOO.transformers("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", lambda tf:
    tf.Qwen2_5_VLConfig(text_config=LLM | {"rope_parameters": MROPE}, vision_config={"depth": 2, "hidden_size": 16,
    "out_hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2,
    "window_size": 16, "fullatt_block_indexes": [1]}, **QWEN), _qwen_inputs)
ZOO.transformers("qwen3_vl", "Qwen3VLForConditionalGeneration", lambda tf:
    tf.Qwen3VLConfig(text_config=LLM | {"rope_parameters": MROPE, "head_dim": 8}, vision_config={"depth": 2,
    "hidden_size": 16, "out_hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
    "temporal_patch_size": 2, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}, **QWEN), _qwen_inputs)
