"""Models of images of transformers."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Family, Inputs, Sample, pictures

# fmt: off

ZOO = Family("vision")

VIT: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24,
    "image_size": 8, "patch_size": 4, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
CLASSES: dict[str, Any] = {"num_labels": 5}
SMALL = pictures(classes=5)
LARGE = pictures(32, classes=5)


def vision(name: str, model: str, inputs: Inputs, **settings: Any) -> None:
    """Adds a model by its settings."""
    ZOO.transformers(name, model, settings, inputs)


vision("vit", "ViTForImageClassification", SMALL, **VIT, **CLASSES)
vision("vit_masked", "ViTForMaskedImageModeling", lambda step: ((), pictures()(step)[1] | {"bool_masked_pos":
    torch.rand(2, 4) < 0.5}), **VIT, encoder_stride=4)
vision("vit_mae", "ViTMAEForPreTraining", pictures(), **VIT, decoder_num_attention_heads=2, decoder_hidden_size=16,
    decoder_num_hidden_layers=2, decoder_intermediate_size=24, mask_ratio=0.5)
vision("deit", "DeiTForImageClassification", SMALL, **VIT, **CLASSES)
vision("beit", "BeitForImageClassification", SMALL, **VIT, **CLASSES, drop_path_rate=0.2,
    use_relative_position_bias=True)
vision("data2vec_vision", "Data2VecVisionForImageClassification", SMALL, **VIT, **CLASSES,
    use_shared_relative_position_bias=True, use_relative_position_bias=False)
vision("dinov2", "Dinov2ForImageClassification", SMALL, **VIT, **CLASSES, drop_path_rate=0.2, use_swiglu_ffn=True)
vision("dinov2_registers", "Dinov2WithRegistersForImageClassification", SMALL, **VIT, **CLASSES, num_register_tokens=2)
vision("ijepa", "IJepaForImageClassification", SMALL, **VIT, **CLASSES)
vision("yolos", "YolosForObjectDetection", pictures(), **{**VIT, "image_size": [8, 8]}, num_detection_tokens=3,
    use_mid_position_embeddings=True)
vision("dpt", "DPTForDepthEstimation", pictures(16), **{**VIT, "image_size": 16}, backbone_out_indices=[0, 1, 2],
    neck_hidden_sizes=[8, 8, 8], fusion_hidden_size=8, reassemble_factors=[2, 1, 0.5], is_hybrid=False)
SWIN: dict[str, Any] = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2],
    "window_size": 2, "drop_path_rate": 0.2, "hidden_dropout_prob": 0.1}
vision("swin", "SwinForImageClassification", pictures(16, classes=5), **SWIN, **CLASSES)
vision("swinv2", "Swinv2ForImageClassification", pictures(16, classes=5), **SWIN, **CLASSES)
vision("donut_swin", "DonutSwinForImageClassification", pictures(16, classes=5), **SWIN, **CLASSES)
vision("swin2sr", "Swin2SRForImageSuperResolution", pictures(8), **{**SWIN, "image_size": 8, "patch_size": 1},
    upscale=2, num_channels=3, num_channels_out=3)
vision("hiera", "HieraForImageClassification", pictures(32, classes=5), image_size=[32, 32], embed_dim=8, depths=[1, 1,
    1], num_heads=[1, 2, 4], patch_size=[3, 3], patch_stride=[2, 2], patch_padding=[1, 1], masked_unit_size=[4, 4],
    num_query_pool=2, query_stride=[2, 2], drop_path_rate=0.1, **CLASSES)
CONVNEXT: dict[str, Any] = {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "drop_path_rate": 0.2}
vision("convnext", "ConvNextForImageClassification", LARGE, **CONVNEXT, **CLASSES, layer_scale_init_value=0.1)
vision("convnextv2", "ConvNextV2ForImageClassification", LARGE, **CONVNEXT, **CLASSES)
vision("resnet_hf", "ResNetForImageClassification", LARGE, embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2],
    layer_type="basic", **CLASSES)
vision("regnet", "RegNetForImageClassification", LARGE, embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2],
    groups_width=4, **CLASSES)
vision("bit", "BitForImageClassification", LARGE, embedding_size=8, hidden_sizes=[32, 64], depths=[1, 2], num_groups=4,
    drop_path_rate=0.2, **CLASSES)
vision("mobilenet_v1", "MobileNetV1ForImageClassification", LARGE, depth_multiplier=0.25, min_depth=4, **CLASSES)
vision("mobilenet_v2", "MobileNetV2ForImageClassification", LARGE, depth_multiplier=0.25, min_depth=4,
    finegrained_output=False, **CLASSES)
vision("efficientnet", "EfficientNetForImageClassification", LARGE, width_coefficient=0.1, depth_coefficient=0.1,
    hidden_dim=128, depth_divisor=4, drop_connect_rate=0.2, **CLASSES)
vision("mobilevit", "MobileViTForImageClassification", pictures(64, classes=5), hidden_sizes=[8, 12, 16],
    neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 16], num_attention_heads=2, mlp_ratio=1.0, image_size=64, **CLASSES)
vision("segformer", "SegformerForSemanticSegmentation", lambda step: ((), pictures(32)(step)[1] | {"labels":
    torch.randint(0, 5, (2, 32, 32))}), num_encoder_blocks=2, depths=[1, 2], sr_ratios=[2, 1], hidden_sizes=[8, 16],
    num_attention_heads=[1, 2], patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2], decoder_hidden_size=8,
    drop_path_rate=0.2, **CLASSES)
vision("glpn", "GLPNForDepthEstimation", pictures(64), num_encoder_blocks=4, depths=[1, 1, 1, 1], hidden_sizes=[4, 8, 8,
    8], num_attention_heads=[1, 1, 2, 2], sr_ratios=[4, 2, 1, 1], mlp_ratios=[2, 2, 2, 2], decoder_hidden_size=8)
vision("pvt", "PvtForImageClassification", LARGE, image_size=32, num_encoder_blocks=2, depths=[1, 2],
    sequence_reduction_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[4, 2], strides=[4, 2], num_attention_heads=[1,
    2], mlp_ratios=[2, 2], drop_path_rate=0.2, **CLASSES)
vision("poolformer", "PoolFormerForImageClassification", LARGE, num_encoder_blocks=2, depths=[1, 2], hidden_sizes=[8,
    16], patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1], drop_path_rate=0.2, **CLASSES)
vision("focalnet", "FocalNetForImageClassification", pictures(16, classes=5), image_size=16, patch_size=4, embed_dim=8,
    depths=[1, 2], focal_levels=[2, 2], focal_windows=[3, 3], hidden_sizes=[8, 16], drop_path_rate=0.2, **CLASSES)
vision("levit", "LevitForImageClassification", pictures(64, classes=5), image_size=64, hidden_sizes=[8, 16],
    num_attention_heads=[1, 2], depths=[1, 1], key_dim=[4, 4], attention_ratio=[2, 2], mlp_ratio=[2, 2],
    drop_path_rate=0, down_ops=[["Subsample", 4, 2, 4, 2, 2], [""]], **CLASSES)
vision("cvt", "CvtForImageClassification", LARGE, embed_dim=[8, 16], depth=[1, 2], num_heads=[1, 2], patch_sizes=[7, 3],
    patch_stride=[4, 2], patch_padding=[2, 1], mlp_ratio=[2.0, 2.0], attention_drop_rate=[0.0, 0.0], drop_rate=[0.1,
    0.1], drop_path_rate=[0.0, 0.1], qkv_bias=[True, True], cls_token=[False, True], qkv_projection_method=["dw_bn",
    "dw_bn"], kernel_qkv=[3, 3], padding_kv=[1, 1], stride_kv=[2, 2], padding_q=[1, 1], stride_q=[1, 1], **CLASSES)
vision("timesformer", "TimesformerForVideoClassification", lambda _: ((), {"pixel_values": torch.randn(2, 2, 3, 8, 8),
    "labels": torch.randint(0, 5, (2,))}), **VIT, **CLASSES, num_frames=2)
vision("videomae", "VideoMAEForVideoClassification", lambda _: ((), {"pixel_values": torch.randn(2, 2, 3, 8, 8),
    "labels": torch.randint(0, 5, (2,))}), **VIT, **CLASSES, num_frames=2, tubelet_size=2)


def _detr(tf: Any) -> Any:
    backbone = tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
        out_features=["stage2"])
    return tf.DetrConfig(use_timm_backbone=False, backbone_config=backbone, d_model=16, encoder_layers=2,
    decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_queries=4,
        num_labels=3, use_pretrained_backbone=False, backbone=None)


def _scene(step: int) -> Sample:
    keep = torch.ones(2, 32, 32, dtype=torch.int64)
    keep[1, 24 - 4 * step :] = 0
    return (), {"pixel_values": torch.randn(2, 3, 32, 32), "pixel_mask": keep}


ZOO.transformers("detr", "DetrForObjectDetection", _detr, _scene)
