"""EqualBlocks: a model whose blocks share one template."""

from __future__ import annotations

import torch
from torch import nn


class EqualBlocks(nn.Module):
    """Equal blocks of 32 features.

    Args:
        depth: How many.
        extra: Is called on what each block makes.
    """

    def __init__(self, depth: int = 4, extra: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(depth))
        self.extra = extra or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.extra(layer(x))
        return x
