"""Models of sound of transformers."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Family, Inputs, Sample, normal
from tests.zoo.seq2seq import BART

# fmt: off

ZOO = Family("audio")

SPEECH: dict[str, Any] = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "conv_dim": [8, 8], "conv_kernel": [4, 3], "conv_stride": [4, 2],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0,
    "mask_time_length": 2, "mask_time_prob": 0.2, "pad_token_id": 0}
UNMASKED = SPEECH | {"apply_spec_augment": False}


def _speech(_: int) -> Sample:
    return (), {"input_values": torch.randn(2, 160), "labels": torch.randint(1, 16, (2, 4))}


def _long_speech(step: int) -> Sample:
    keep = torch.ones(2, 160, dtype=torch.int64)
    keep[1, 120 - 8 * step :] = 0
    return (), _speech(step)[1] | {"attention_mask": keep}


def audio(name: str, model: str, settings: dict[str, Any], inputs: Inputs = _speech) -> None:
    """Adds a model by its settings."""
    ZOO.transformers(name, model, settings, inputs)


WHISPER: dict[str, Any] = BART | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16, "dropout":
    0.1}


def _mel(_: int) -> Sample:
    return (), {"input_features": torch.randn(2, 8, 20), "labels": torch.randint(3, 64, (2, 5))}


audio("whisper", "WhisperForConditionalGeneration", WHISPER, _mel)
audio("whisper_layerdrop", "WhisperForConditionalGeneration", WHISPER | {"encoder_layerdrop": 0.3, "decoder_layerdrop":
    0.3}, _mel)
audio("whisper_masked", "WhisperForConditionalGeneration", WHISPER | {"apply_spec_augment": True, "mask_time_prob": 0.2,
    "mask_time_length": 2, "mask_time_min_masks": 1}, _mel)
audio("wav2vec2", "Wav2Vec2ForCTC", SPEECH)
audio("wav2vec2_unmasked", "Wav2Vec2ForCTC", UNMASKED)
audio("wav2vec2_padded", "Wav2Vec2ForCTC", UNMASKED | {"feat_extract_norm": "layer"}, _long_speech)
audio("wav2vec2_stable", "Wav2Vec2ForCTC", UNMASKED | {"do_stable_layer_norm": True, "feat_extract_norm": "layer"})
audio("wav2vec2_layerdrop", "Wav2Vec2ForCTC", UNMASKED | {"layerdrop": 0.3})
audio("wav2vec2_conformer", "Wav2Vec2ConformerForCTC", UNMASKED | {"position_embeddings_type": "relative",
    "conv_depthwise_kernel_size": 3, "max_source_positions": 64})
audio("wav2vec2_bert", "Wav2Vec2BertForCTC", UNMASKED | {"feature_projection_input_dim": 8,
    "conv_depthwise_kernel_size": 3, "left_max_position_embeddings": 4, "right_max_position_embeddings": 2}, lambda _:
    ((), {"input_features": torch.randn(2, 20, 8), "labels": torch.randint(1, 16, (2, 4))}))
audio("hubert", "HubertForCTC", UNMASKED)
audio("wavlm", "WavLMForCTC", UNMASKED | {"num_buckets": 8, "max_bucket_distance": 16})
audio("unispeech_sat", "UniSpeechSatForCTC", UNMASKED)
audio("data2vec_audio", "Data2VecAudioForCTC", UNMASKED | {"conv_pos_kernel_size": 3})
audio("sew", "SEWForCTC", UNMASKED | {"squeeze_factor": 2})
audio("sew_d", "SEWDForCTC", UNMASKED | {"squeeze_factor": 2, "max_position_embeddings": 32, "position_buckets": 8})
audio("ast", "ASTForAudioClassification", {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "patch_size": 4, "max_length": 16, "num_mel_bins": 8, "frequency_stride": 4, "time_stride":
    4, "num_labels": 5}, lambda _: ((), {"input_values": torch.randn(2, 16, 8), "labels": torch.randint(0, 5, (2,))}))
audio("speech_to_text", "Speech2TextForConditionalGeneration", BART | {"input_feat_per_channel": 8, "input_channels": 1,
    "conv_channels": 8, "num_conv_layers": 2, "conv_kernel_sizes": [3, 3], "max_source_positions": 32,
    "max_target_positions": 16, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}, lambda _: ((), {"input_features":
    torch.randn(2, 20, 8), "labels": torch.randint(3, 64, (2, 5))}))
audio("moonshine", "MoonshineForConditionalGeneration", {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24,
    "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 2,
    "decoder_num_attention_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "decoder_start_token_id": 1,
    "use_cache": False}, lambda _: ((), {"input_values": torch.randn(2, 1600), "labels": torch.randint(3, 64, (2, 5))}))
audio("encodec", "EncodecModel", {"num_filters": 2, "codebook_size": 8, "hidden_size": 8, "codebook_dim": 8,
    "num_lstm_layers": 1, "upsampling_ratios": [2, 2], "target_bandwidths": [48.0], "sampling_rate": 24000,
    "num_residual_layers": 1}, lambda _: ((), {"input_values": torch.randn(2, 1, 64)}))
audio("univnet", "UnivNetModel", {"model_in_channels": 4, "model_hidden_channels": 4, "num_mel_bins": 4,
    "resblock_kernel_sizes": [3], "resblock_stride_sizes": [2], "resblock_dilation_sizes": [[1]],
    "kernel_predictor_num_blocks": 1, "kernel_predictor_hidden_channels": 4}, normal((1, 6, 4)))


def _clap(tf: Any) -> Any:
    text = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 24, "max_position_embeddings": 32, "projection_dim": 8}
    sound = {"spec_size": 16, "num_mel_bins": 8, "patch_size": 2, "patch_stride": [2, 2], "window_size": 2,
        "hidden_size": 8, "patch_embeds_hidden_size": 4, "depths": [1, 1], "num_attention_heads": [1, 2],
        "num_hidden_layers": 2, "projection_dim": 8, "enable_fusion": False}
    return tf.ClapConfig(text_config=text, audio_config=sound, projection_dim=8)


ZOO.transformers("clap", "ClapModel", _clap, lambda _: ((), {"input_ids": torch.randint(3, 64, (2, 6)),
    "input_features": torch.randn(2, 1, 16, 8), "return_loss": True}))
