"""A model whose attention is worth keeping: long texts in narrow heads. And a count of the kernels that ran."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.hardware.hardware import Hardware

TOKENS, WIDTH, HEADS = 1024, 32, 2

EAGER_TO_KEEP = Hardware(1e12, 1e12, {"fp32": 1e12, "bf16": 1e12, "fp32 attention": 1e9, "bf16 attention": 1e9})
"""A machine whose attention is slow, and whose link isn't."""


class Attention(nn.Module):
    """A layer of attention; a `kind` changes the call.

    Args:
        kind: `"causal"`, `"full"`, `"mask"`, `"scale"`, `"grouped"`, `"dropout"`, or `"twice"` for two calls.
    """

    def __init__(self, kind: str = "causal") -> None:
        super().__init__()
        self.kind, self.fewer = kind, 1 if kind == "grouped" else HEADS
        # No tensor is smaller than the 512 bytes to which allocators round.
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH * self.fewer // HEADS, bias=False) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        q, k, v = (
            made.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for made in (self.q(normed), self.k(normed), self.v(normed))
        )
        found = self.attended(q, k, v)
        if self.kind == "twice":
            found = self.attended(found, k, v)
        return x + self.out(found.transpose(1, 2).flatten(2))

    def attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {
            "full": {},
            "mask": {"attn_mask": torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril(3)},
            "scale": {"is_causal": True, "scale": 0.3},
            "grouped": {"is_causal": True, "enable_gqa": True},
            "dropout": {"is_causal": True, "dropout_p": 0.25 if self.training else 0.0},
        }.get(self.kind, {"is_causal": True})
        return F.scaled_dot_product_attention(q, k, v, **options)


class Layer(nn.Module):
    """Attention and an MLP."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention = Attention(kind)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Layers."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        kinds = kinds or ("causal",) * 4
        self.layers = nn.ModuleList(map(Layer, kinds))
        self.calls = [2 if kind == "twice" else 1 for kind in kinds]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layers(Stack):
    """Layers, and a loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float().square().mean()


def text(step: int = 0, size: int = 1, length: int = TOKENS) -> torch.Tensor:
    return torch.randn(size, length, WIDTH, generator=torch.Generator().manual_seed(step))


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_attention" in func.name():
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


@contextmanager
def kernels_of_attention() -> Generator[list[str]]:
    """Lists the kernels of attention that run: forwards and backwards."""
    with _Counting() as counting:
        yield counting.found


def forwards(kernels: list[str]) -> int:
    return sum("backward" not in name for name in kernels)
