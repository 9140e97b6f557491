"""Models written by hand in plain PyTorch, each with one habit that real models have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.models import Cnn, Gpt, Lstm
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


def ids(vocab: int, *shape: int) -> Callable[[int], Sample]:
    return lambda _: ((torch.randint(0, vocab, shape),), {})


def stacked(name: str, block: Callable[[int], nn.Module], **options: Any) -> None:
    """Adds a stack of `block`s."""
    ZOO.add(name, lambda: Stack(block), X, **options)


ZOO.add(
    "mlp_seq",
    lambda: nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))),
    X,
    fast=True,
)


def _gpt_inputs(_: int) -> Sample:
    tokens = torch.randint(0, 32, (2, 8))
    return (tokens,), {"targets": tokens.roll(-1, 1)}


ZOO.add("mygpt", Gpt, _gpt_inputs)
ZOO.add("resnet", Cnn, normal((2, 3, 8, 8)), fast=True)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def _encoder_inputs(step: int) -> Sample:
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3 - step :] = True
    return (torch.randn(2, 5, 16),), {"src_key_padding_mask": padding}


ZOO.add("nn_tenc", _encoder, _encoder_inputs)
ZOO.add(
    "nn_transformer",
    lambda: nn.Transformer(16, 2, 2, 2, 32, dropout=0.1, batch_first=True),
    normal((2, 5, 16), (2, 4, 16)),
)
ZOO.add("lstm", Lstm, ids(11, 2, 5))


class Branching(Block):
    """Branches on an activation."""

    def forward(self, x):
        y = super().forward(x)
        return y * 1.5 if y.sum() > 0 else y - 0.5


stacked("ctrl_in_block", lambda _: Branching())


class BranchingTop(Stack):
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            if x.sum() > 0:
                x = x * 0.5
        return self.head(x)


ZOO.add("ctrl_in_top", BranchingTop, X)


class HalfGradient(torch.autograd.Function):
    """Squares; its backward is its own, half of the truth, so that a lost backward shows."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, *grads):
        (x,) = ctx.saved_tensors
        return grads[0] * x


class WithFunction(Block):
    def forward(self, x):
        return super().forward(x) + HalfGradient.apply(x).tanh()


stacked("autograd_fn", lambda _: WithFunction(), fast=True)


@dataclass
class Found:
    hidden: torch.Tensor
    norms: list[torch.Tensor]


class DataclassBlock(Block):
    def forward(self, found):
        hidden = super().forward(found.hidden)
        return Found(hidden, [*found.norms, hidden.norm()])


class DataclassOut(Stack):
    def forward(self, x):
        found = Found(self.stem(x), [])
        for block in self.blocks:
            found = block(found)
        return Found(self.head(found.hidden), found.norms)


ZOO.add("dataclass_out", lambda: DataclassOut(lambda _: DataclassBlock()), X)


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


class InplaceBlock(Block):
    """Changes what it was given, and returns it."""

    def forward(self, x):
        y = self.down(F.gelu(self.up(self.norm(x * 2))))
        x += y
        x[:, 0].mul_(0.5)
        return x


stacked("inplace_alias", lambda _: InplaceBlock(), fast=True)


class ViewBlock(Block):
    """Returns views of one tensor, which the next block reads."""

    def forward(self, x):
        x = super().forward(x.contiguous())
        return x, x.transpose(0, 1), x.chunk(2, -1)


class Views(Stack):
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x, turned, (left, right) = block(x)
            x = torch.cat([left, right * 0.5], -1) + turned.transpose(0, 1)
        return self.head(x)


ZOO.add("views", lambda: Views(lambda _: ViewBlock()), X)


class SharedTwice(Stack):
    """Calls its blocks in two rounds, over a second kind of block in between."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.mix = nn.ModuleList(nn.Bilinear(8, 8, 8) for _ in range(2))

    def forward(self, x):
        x = first = self.stem(x)
        for mix in self.mix:
            for block in self.blocks:
                x = block(x)
            x = x + mix(x, first)
        return self.head(x)


ZOO.add("shared_twice", SharedTwice, X)


class AuxBlock(Block):
    """Leaves a loss in an attribute."""

    def forward(self, x):
        self.aux = self.up(x).square().mean()
        return super().forward(x)


class AuxAttr(Stack):
    def forward(self, x):
        logits = super().forward(x)
        blocks: Any = self.blocks
        return logits, sum(block.aux for block in blocks)


ZOO.add("aux_attr", lambda: AuxAttr(lambda _: AuxBlock()), X)


class DropPath(Block):
    def forward(self, x):
        y = super().forward(x) - x
        keep = torch.rand(x.shape[0], 1, 1, device=x.device) < 0.7
        return x + y * keep / 0.7


stacked("droppath", lambda _: DropPath())


class UnetSkip(nn.Module):
    """Skips across the middle, and a weight of a block that the top level reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.down: Any = nn.ModuleList(Block() for _ in range(3))
        self.up = nn.ModuleList(Block() for _ in range(3))
        self.merge = nn.ModuleList(nn.Linear(16, 8) for _ in range(3))

    def forward(self, x):
        x, skips = self.stem(x), []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for block, merge in zip(self.up, self.merge, strict=True):
            x = block(merge(torch.cat([x, skips.pop()], -1)))
        return F.linear(x, self.down[0].up.weight).mean(-1)


ZOO.add("unet_skip", UnetSkip, X)
