"""Trains a model with a device-memory budget below the size of its weights, and prints what ran.

python examples/minimal.py
"""

import torch
from torch import nn

import megatrain


class Residual(nn.Module):
    """One layer; eight of them are the model."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds the layer's result to its input."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


torch.manual_seed(0)
model = nn.Sequential(*(Residual(64) for _ in range(8)))
inputs = torch.randn(16, 64)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
# With a GPU leave out `device` and `memory`: the device is the accelerator, the budget its free memory.
compiled = megatrain.compile(model, device="cpu", memory="600KiB")


def loss_of(result: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """The task is to move each row by one column."""
    return nn.functional.mse_loss(result, batch.roll(1, dims=1))


step = megatrain.TrainStep(compiled, optimizer, loss=loss_of, max_grad_norm=1.0)

for number in range(40):
    loss = step(inputs)
    if number % 10 == 0 or number == 39:
        print(f"step {number + 1}: loss {loss.item():.4f}")

weights = sum(p.nbytes for p in model.parameters())
print(f"\nweights {weights} B, most that the device held {compiled.peak_bytes} B, budget {600 * 1024} B\n")
print(step.schedule)
