"""Trains a LoRA of a Flux transformer by flow matching, on latents and texts from a folder, in two aspect ratios.

Its weights and images are random and small; nothing is downloaded. Needs diffusers. python examples/diffusion_lora.py
"""

import tempfile
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel  # pyright: ignore[reportMissingImports]
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn

import megatrain

torch.manual_seed(0)
cache = Path((folder := tempfile.TemporaryDirectory()).name)
for number in range(8):  # what an autoencoder and text encoders leave; 2 x 2 latents are packed into a token
    places = torch.ones(((4, 4), (2, 6))[number % 2]).nonzero().float()  # rows and columns
    image = {"latents": torch.randn(len(places), 16), "img_ids": nn.functional.pad(places, (1, 0))}
    save_file(image | {"text": torch.randn(6, 24), "pooled": torch.randn(12)}, cache / f"{number}.safetensors")

sizes = {"num_layers": 2, "num_single_layers": 6, "attention_head_dim": 16, "num_attention_heads": 4}
shapes = {"in_channels": 16, "joint_attention_dim": 24, "pooled_projection_dim": 12, "axes_dims_rope": (4, 6, 6)}
transformer = FluxTransformer2DModel(**sizes, **shapes).requires_grad_(False)
transformer.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))


class FlowMatching(nn.Module):
    """A transformer that predicts the velocity from images (time 0) to noise (time 1)."""

    def __init__(self, transformer):
        super().__init__()
        self.transformer = transformer

    def forward(self, latents, noise, times, text, pooled, img_ids, txt_ids):
        """Returns the loss of images and noise, mixed at these times."""
        given = {"pooled_projections": pooled, "img_ids": img_ids, "txt_ids": txt_ids, "return_dict": False}
        noisy = torch.lerp(latents, noise, times[:, None, None])
        (found,) = self.transformer(noisy, encoder_hidden_states=text, timestep=times, **given)
        return nn.functional.mse_loss(found, noise - latents)


buckets = {}  # files by the rows and columns of their images: each shape is captured once
for path in sorted(cache.iterdir()):
    rows_and_columns = load_file(path)["img_ids"].amax(0)[1:] + 1
    buckets.setdefault(tuple(rows_and_columns.tolist()), []).append(path)


def micro_batch(paths, random):
    """Images of one shape, with noise and times that the generator gives."""
    images = [load_file(path) for path in paths]
    batch = {key: torch.stack([image[key] for image in images]) for key in ("latents", "text", "pooled")}
    noise, times = torch.randn(batch["latents"].shape, generator=random), torch.randn(len(paths), generator=random)
    places = {"img_ids": images[0]["img_ids"], "txt_ids": torch.zeros(6, 3)}
    return batch | places | {"noise": noise, "times": times.sigmoid()}  # as for SD3 and Flux: more of the middle


trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
compiled = megatrain.compile(FlowMatching(transformer), device="cpu", memory="1500KiB")  # a GPU: without both
step = megatrain.TrainStep(compiled, torch.optim.AdamW(trained, lr=1e-2, fused=True), max_grad_norm=1.0)
for number in range(20):
    random = torch.Generator().manual_seed(number % 10)
    loss = step([micro_batch(paths, random) for paths in buckets.values()])  # shapes differ within a step
    if number % 5 == 4:
        print(f"step {number + 1}: loss {loss.item():.3f}")
transformer.save_lora_adapter(folder.name)  # for diffusers' load_lora_adapter
weights = sum(parameter.nbytes for parameter in transformer.parameters())
print(f"weights {weights} B, the step takes {step.schedule.device_bytes} B of the device")
