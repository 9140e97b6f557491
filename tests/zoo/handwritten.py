"""Models written by hand in plain PyTorch, each with one habit that real models have."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Family, Sample, normal

ZOO = Family("handwritten")


class Block(nn.Module):
    """A residual MLP: what most models below repeat."""

    def __init__(self, width: int = 8, p: float = 0.1):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Stem, blocks, head; `block` makes each block from its index."""

    def __init__(self, block: Callable[[int], nn.Module] = lambda _: Block(), depth: int = 3, width: int = 8):
        super().__init__()
        self.stem = nn.Linear(6, width)
        self.blocks = nn.ModuleList(block(i) for i in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


X = normal((3, 5, 6))


ZOO.add(
    "nn_transformer",
    lambda: nn.Transformer(16, 2, 2, 2, 32, dropout=0.1, batch_first=True),
    normal((2, 5, 16), (2, 4, 16)),
)


class BranchingTop(Stack):
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            if x.sum() > 0:
                x = x * 0.5
        return self.head(x)


ZOO.add("ctrl_in_top", BranchingTop, X)


class NestedBlock(Block):
    def forward(self, states, *, options):
        x, (y, z) = states["x"], states["rest"]
        x = super().forward(x) + options["scale"] * y
        return {"x": x, "rest": (y + options["shift"] * x, [z, x][0])}


class NestedIo(Stack):
    def forward(self, batch, options=None):
        states = {"x": self.stem(batch["x"]), "rest": (self.stem(batch["y"]), batch["z"])}
        for block in self.blocks:
            states = block(states, options=options)
        return {"logits": self.head(states["x"]), "rest": states["rest"]}


def _nested_inputs(_: int) -> Sample:
    batch = {"x": torch.randn(3, 5, 6), "y": torch.randn(3, 5, 6), "z": torch.randn(3, 5, 8)}
    return (batch,), {"options": {"scale": 0.5, "shift": 0.25}}


ZOO.add("nested_io", lambda: NestedIo(lambda _: NestedBlock()), _nested_inputs)
