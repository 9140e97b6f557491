"""Plans of LoRA for diffusion transformers of diffusers, from their configurations alone, on small cards.

    python -m benchmarks.diffusion                                # all rows of docs/machines.md, in about an hour
    python -m benchmarks.diffusion --only flux --memory 21.6GiB   # one

A step has four micro-batches of one image: the transformer's part, on cached latents and texts. Needs diffusers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

import megatrain

CARDS = {"21.6GiB": "rtx-4090", "14.4GiB": "rtx-5060-ti", "10.8GiB": "rtx-3080"}
"""What torch has of a card of 24, 16 and 12 GB, and whose rates are taken."""
MICRO_BATCHES = 4
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


class FlowMatching(nn.Module):
    """The loss of a velocity; see examples/diffusion_lora.py."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, latents: torch.Tensor, noise: torch.Tensor, times: torch.Tensor, **given: Any) -> torch.Tensor:
        """Returns the loss of images and noise, mixed at these times."""
        noisy = torch.lerp(latents, noise, times.view([-1] + [1] * (latents.ndim - 1)))
        found = self.transformer(hidden_states=noisy, timestep=times, **given, return_dict=False)[0]
        return nn.functional.mse_loss(found.float(), (noise - latents).float())


def _bf16(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def _images(*shape: int, text: tuple[int, ...], **more: tuple[int, ...]) -> dict[str, Any]:
    return _bf16(latents=shape, noise=shape, times=(1,), encoder_hidden_states=text, **more)


def _flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel  # pyright: ignore[reportMissingImports]

    return FluxTransformer2DModel(guidance_embeds=True)


def _qwen() -> nn.Module:
    from diffusers import QwenImageTransformer2DModel  # pyright: ignore[reportMissingImports]

    transformer = QwenImageTransformer2DModel()
    with torch.device("cpu"):  # its angles are plain attributes, whose values the forward reads
        transformer.pos_embed = type(transformer.pos_embed)(theta=10000, axes_dim=[16, 56, 56], scale_rope=True)
    return transformer


def _wan() -> nn.Module:
    from diffusers import WanTransformer3DModel  # pyright: ignore[reportMissingImports]

    return WanTransformer3DModel()


class _OfLists(nn.Module):
    """A transformer that takes lists of images and of texts; here both are batches of one shape."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        return_dict: bool,
    ) -> Any:
        """Returns the images as one batch."""
        found = self.transformer(list(hidden_states), timestep, list(encoder_hidden_states), return_dict=return_dict)[0]
        return (torch.stack(found),)


def _z_image() -> nn.Module:
    from diffusers import ZImageTransformer2DModel  # pyright: ignore[reportMissingImports]

    transformer = ZImageTransformer2DModel()
    rope = transformer.rope_embedder  # its angles are plain attributes, which the first forward would make
    rope.freqs_cis = rope.precompute_freqs_cis(rope.axes_dims, rope.axes_lens, theta=rope.theta)
    return _OfLists(transformer)


def _sd35() -> nn.Module:
    from diffusers import SD3Transformer2DModel  # pyright: ignore[reportMissingImports]

    sizes = {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192}
    return SD3Transformer2DModel(**sizes, qk_norm="rms_norm")


MODELS: Mapping[str, tuple[str, Callable[[], nn.Module], dict[str, Any]]] = {
    "z-image": ("Z-Image, 1024 x 1024", _z_image, _images(1, 16, 1, 128, 128, text=(1, 256, 2560))),
    "sd35": ("SD 3.5 large, 1024 x 1024", _sd35, _images(1, 16, 128, 128, text=(1, 333, 4096),
        pooled_projections=(1, 2048))),
    "flux": ("Flux.1 dev, 1024 x 1024", _flux, _images(1, 4096, 64, text=(1, 512, 4096), pooled_projections=(1, 768),
        img_ids=(4096, 3), txt_ids=(512, 3), guidance=(1,))),
    "wan": ("Wan 14B, one frame of 832 x 480", _wan, _images(1, 16, 1, 60, 104, text=(1, 512, 4096))),
    "qwen": ("Qwen-Image, 1024 x 1024", _qwen, _images(1, 4096, 64, text=(1, 256, 3584)) | {
        "encoder_hidden_states_mask": torch.ones(1, 256, dtype=torch.long), "img_shapes": [(1, 64, 64)]}),
}  # fmt: skip


def planned(name: str, memory: str) -> Any:
    """The plan of a model's LoRA with so much of a card's memory."""
    _, make, given = MODELS[name]
    with torch.device("meta"):
        transformer = make().to(torch.bfloat16).requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS), transformer)
    return megatrain.plan(
        FlowMatching(transformer),
        hardware=CARDS[memory],
        device_memory=memory,
        optimizer="AdamW",
        micro_batches=MICRO_BATCHES,
        max_grad_norm=1.0,
        example_kwargs=given,
    )


def main() -> None:
    """Prints a row for each model, with a cell for each memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, nargs="*", default=list(MODELS))
    parser.add_argument("--memory", choices=CARDS, nargs="*", default=list(CARDS))
    options = parser.parse_args()
    for name in options.only:
        for memory in options.memory:
            plan = planned(name, memory)
            device, host = plan.schedule.device_bytes / 2**30, plan.host.total_bytes / 2**30
            found = (
                f"{plan.step_s:.1f} s, {device:.1f} GiB" if plan.too_small is None else plan.too_small.splitlines()[0]
            )
            print(f"{MODELS[name][0]} | {memory} | {found} | host {host:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
