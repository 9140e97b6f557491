"""A step that is planned in milliseconds, with every option that alternatives change."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

import megatrain

IDS = torch.randint(0, 32, (4, 8))
OPTIONS: dict[str, Any] = {
    "device_memory": "600KiB",
    "host_memory": "3MiB",
    "optimizer": "AdamW",
    "micro_batches": 2,
    "max_grad_norm": 1.0,
    "hardware": "rtx-4090",
}


class Words(nn.Module):
    """Token ids, three layers, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
        self.head = nn.Linear(64, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def on_meta() -> Words:
    with torch.device("meta"):
        return Words()


@functools.cache
def made(**options: Any) -> megatrain.Plan:
    """A plan for tests that only read it; what it planned for others it remembers."""
    return planned(**options)


def planned(model: nn.Module | None = None, ids: Any = IDS, **options: Any) -> megatrain.Plan:
    return megatrain.plan(model or on_meta(), ids, **{**OPTIONS, **options})
