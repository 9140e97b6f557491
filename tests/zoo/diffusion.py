"""Denoisers and autoencoders of diffusers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.case import Family, Inputs, Sample

# fmt: off

ZOO = Family("diffusion", needs=("diffusers",))


def _build(model: str, settings: dict[str, Any]) -> nn.Module:
    import diffusers  # pyright: ignore[reportMissingImports]  # the tests do without

    return getattr(diffusers, model)(**settings).train()


def diffusion(name: str, model: str, inputs: Inputs, **settings: Any) -> None:
    """Adds a model by its settings."""
    ZOO.add(name, lambda: _build(model, settings), inputs)


def noisy(shape: tuple[int, ...], *, time: str = "timestep", whole: bool = True, sample: str = "hidden_states",
          **others: tuple[int, ...]) -> Inputs:
    """A noisy sample of `shape`, a time each, and conditions drawn from the normal distribution."""

    def inputs(_: int) -> Sample:
        times = torch.randint(0, 1000, shape[:1]) if whole else torch.rand(shape[:1])
        given = {sample: torch.randn(shape), time: times}
        return (), given | {name: torch.randn(other) for name, other in others.items()}

    return inputs


UNET: dict[str, Any] = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 8,
    "attention_head_dim": 4, "dropout": 0.1}
diffusion("diff_unet", "UNet2DConditionModel", noisy((2, 4, 8, 8), sample="sample", encoder_hidden_states=(2, 5, 12)),
    **UNET, cross_attention_dim=12, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"))
diffusion("diff_unet_plain", "UNet2DModel", noisy((2, 3, 8, 8), sample="sample"), **UNET,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"))
diffusion("diff_controlnet", "ControlNetModel", noisy((2, 4, 8, 8), sample="sample", encoder_hidden_states=(2, 5, 12),
    controlnet_cond=(2, 3, 64, 64)), **{k: v for k, v in UNET.items() if k not in ("sample_size", "dropout")},
    cross_attention_dim=12, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    conditioning_embedding_out_channels=(4, 4, 8, 8))
DIT: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3, "sample_size": 8}


def _labelled(_: int) -> Sample:
    return (torch.randn(2, 4, 8, 8),), {
        "timestep": torch.randint(0, 10, (2,)),
        "class_labels": torch.randint(0, 9, (2,)),
    }


diffusion("diff_dit", "DiTTransformer2DModel", _labelled, **DIT, num_embeds_ada_norm=10, norm_num_groups=4, dropout=0.1)
FLUX_SHAPES: dict[str, Any] = {"encoder_hidden_states": (2, 5, 12), "pooled_projections": (2, 6)}
diffusion("diff_flux", "FluxTransformer2DModel", lambda step: ((), noisy((2, 16, 4), whole=False,
    **FLUX_SHAPES)(step)[1] | {"img_ids": torch.randint(0, 4, (16, 3)).float(), "txt_ids": torch.zeros(5, 3)}),
    in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=2,
    joint_attention_dim=12, pooled_projection_dim=6, axes_dims_rope=(4, 2, 2))
diffusion("diff_sd3", "SD3Transformer2DModel", noisy((2, 4, 8, 8), encoder_hidden_states=(2, 5, 12),
    pooled_projections=(2, 6)), **{**DIT, "num_layers": 2}, in_channels=4, out_channels=4, joint_attention_dim=12,
    caption_projection_dim=16, pooled_projection_dim=6, pos_embed_max_size=8, qk_norm="rms_norm")
diffusion("diff_pixart", "PixArtTransformer2DModel", lambda step: ((), noisy((2, 4, 8, 8), encoder_hidden_states=(2, 5,
    12))(step)[1] | {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}), **DIT, cross_attention_dim=16,
    caption_channels=12, norm_num_groups=4, use_additional_conditions=False)
diffusion("diff_sana", "SanaTransformer2DModel", noisy((2, 4, 8, 8), encoder_hidden_states=(2, 5, 12)), **DIT,
    in_channels=4, out_channels=4, num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16,
    caption_channels=12)
diffusion("diff_auraflow", "AuraFlowTransformer2DModel", noisy((2, 4, 8, 8), whole=False, encoder_hidden_states=(2, 5,
    12)), sample_size=8, num_mmdit_layers=2, num_single_dit_layers=2, attention_head_dim=8, num_attention_heads=2,
    joint_attention_dim=12, caption_projection_dim=16, pos_embed_max_size=16)
diffusion("diff_wan", "WanTransformer3DModel", noisy((2, 4, 2, 8, 8), encoder_hidden_states=(2, 5, 12)),
    num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=12, freq_dim=8, ffn_dim=24,
    num_layers=2, rope_max_seq_len=16)
diffusion("diff_cogvideox", "CogVideoXTransformer3DModel", noisy((2, 2, 4, 8, 8), encoder_hidden_states=(2, 5, 12)),
    num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=12,
    num_layers=2, sample_width=8, sample_height=8, sample_frames=5, max_text_seq_length=5, dropout=0.1)
diffusion("diff_ltx", "LTXVideoTransformer3DModel", lambda step: ((), noisy((2, 32, 4), encoder_hidden_states=(2, 5,
    12))(step)[1] | {"encoder_attention_mask": torch.ones(2, 5), "num_frames": 2, "height": 4, "width": 4}),
    in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16, num_layers=2,
    caption_channels=12)
diffusion("diff_prior", "PriorTransformer", noisy((2, 12), proj_embedding=(2, 12), encoder_hidden_states=(2, 5, 12)),
    num_attention_heads=2, attention_head_dim=8, num_layers=2, embedding_dim=12, num_embeddings=5, dropout=0.1)
diffusion("diff_unet1d", "UNet1DModel", noisy((2, 2, 64), sample="sample"), sample_size=64, block_out_channels=(32, 32,
    32), extra_in_channels=64)
AUTOENCODER: dict[str, Any] = {"block_out_channels": (8, 8), "norm_num_groups": 4, "latent_channels": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
diffusion("diff_vae", "AutoencoderKL", lambda _: ((torch.randn(2, 3, 8, 8),), {}), **AUTOENCODER)
diffusion("diff_vae_sampled", "AutoencoderKL", lambda _: ((torch.randn(2, 3, 8, 8),), {"sample_posterior": True}),
    **AUTOENCODER)
diffusion("diff_vq", "VQModel", lambda _: ((torch.randn(2, 3, 8, 8),), {}), **AUTOENCODER, num_vq_embeddings=16)
