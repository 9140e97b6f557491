"""Low-rank adapters around frozen linear layers: LoRA by hand, so that it trains where peft isn't installed."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from tests.models import MODELS


class LowRank(nn.Module):
    """A frozen layer plus two thin ones behind a dropout, whose product is scaled."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, dropout: float):
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.scale = scale
        # At zero, as adapters begin, the other half would get no gradient.
        nn.init.normal_(self.lora_B.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_B(self.lora_A(self.dropout(x))) * self.scale


def adapted_llama(targets: Collection[str], *, rank: int, scale: float, dropout: float) -> nn.Module:
    """Returns the small Llama with adapters at all layers of these names, all else frozen; equal ones each time."""
    model = MODELS["llama_labels"]()[0].requires_grad_(False)
    found = [(module, name) for module in model.modules() for name, _ in module.named_children() if name in targets]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        for module, name in found:
            base = getattr(module, name)
            assert isinstance(base, nn.Linear)
            setattr(module, name, LowRank(base, rank, scale, dropout))
    return model.train()
