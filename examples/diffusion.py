"""Trains all weights of a Stable Diffusion 3 transformer by flow matching, averages them, and samples an image.

Its weights and images are random and small; nothing is downloaded. Needs diffusers. python examples/diffusion.py
"""

from itertools import pairwise

import torch
from diffusers import SD3Transformer2DModel  # pyright: ignore[reportMissingImports]
from torch import nn

import megatrain

torch.manual_seed(0)
sizes = {"num_layers": 6, "num_attention_heads": 4, "attention_head_dim": 16, "caption_projection_dim": 64}
shapes = {"in_channels": 4, "out_channels": 4, "joint_attention_dim": 24, "pooled_projection_dim": 12}
transformer = SD3Transformer2DModel(sample_size=8, pos_embed_max_size=8, qk_norm="rms_norm", **sizes, **shapes)
texts = {"encoder_hidden_states": torch.randn(2, 5, 24), "pooled_projections": torch.randn(2, 12)}
images = torch.linspace(-1, 1, 8).expand(2, 4, 8, 8) * torch.tensor([1.0, -1.0]).view(2, 1, 1, 1)


class FlowMatching(nn.Module):
    """A transformer that predicts the velocity from images (time 0) to noise (time 1)."""

    def __init__(self, transformer):
        super().__init__()
        self.transformer = transformer

    def forward(self, latents, noise, times, **texts):
        """Returns the loss of images and noise, mixed at these times."""
        noisy = torch.lerp(latents, noise, times.view(-1, 1, 1, 1))
        found = self.transformer(noisy, timestep=1000 * times, **texts, return_dict=False)[0]
        return nn.functional.mse_loss(found, noise - latents)


def batch(number):
    """Two micro-batches, whose noise and times the number decides."""
    random = torch.Generator().manual_seed(number)
    noise, times = torch.randn(2, *images.shape, generator=random), torch.randn(2, 2, generator=random).sigmoid()
    return [{"latents": images, "noise": n, "times": t, **texts} for n, t in zip(noise, times, strict=True)]


@torch.no_grad()
def sampled():
    """An image for each text: eight steps of Euler from noise to time 0; the weights stream as they are read."""
    found = torch.randn(images.shape, generator=torch.Generator().manual_seed(7))
    with compiled.megatrain.walk():
        for now, then in pairwise(torch.linspace(1, 0, 9)):
            velocity = transformer(found, timestep=1000 * now.expand(2), **texts, return_dict=False)[0]
            found = found + (then - now) * velocity
    return found


compiled = megatrain.compile(FlowMatching(transformer), device="cpu", memory="2200KiB")  # with a GPU: without both
optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-3, fused=True)
step = megatrain.TrainStep(compiled, optimizer, max_grad_norm=1.0)
average = {name: value.clone() for name, value in transformer.state_dict().items()}
for number in range(40):
    loss = step(batch(number))
    torch._foreach_lerp_(list(average.values()), list(transformer.state_dict().values()), 0.1)
    if number % 20 == 19:
        error = nn.functional.mse_loss(sampled(), images)
        print(f"step {number + 1}: loss {loss.item():.3f}, error of sampled images {error.item():.3f}")
transformer.load_state_dict(average)
print(f"with averaged weights {nn.functional.mse_loss(sampled(), images).item():.3f}")
weights = sum(parameter.nbytes for parameter in transformer.parameters())
print(f"weights {weights} B, the step takes {step.schedule.device_bytes} B of the device")
