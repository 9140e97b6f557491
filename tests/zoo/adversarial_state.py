"""Models that break compilers by what they keep or share: hooks, buffers, caches, objects, views."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.adversarial import Adversarial
from tests.zoo.handwritten import Block, Stack

ZOO = Adversarial("adversarial")


@ZOO.stacked
class WeightSpectralNorm(nn.Module):
    """The old form, which keeps its weight as a plain attribute that a hook sets before each call."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.two = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x):
        return x + self.two(torch.tanh(self.one(x)))


@ZOO.stacked
class ModuleBwHook(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))


class SharingBlock(Block):
    def forward(self, x, store, index):
        store[index] = self.up(x)
        return super().forward(x) + 0.1 * store[0][..., :8]


@ZOO.alone
class SharedDict(Stack):
    """Values that cross blocks through a dict, as caches of keys and values do."""

    def __init__(self) -> None:
        super().__init__(lambda _: SharingBlock())

    def forward(self, x):
        store: dict[int, torch.Tensor] = {}
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = block(x, store, index)
        return self.head(x), sum(v.mean() for v in store.values())


class Chained(Block):
    def forward(self, x, rest=()):
        x = super().forward(x)
        return rest[0](x, rest[1:]) if rest else x


@ZOO.alone
class RecursiveBlocks(Stack):
    """Each block calls the next."""

    def __init__(self) -> None:
        super().__init__(lambda _: Chained())

    def forward(self, x):
        blocks = list(self.blocks)
        return self.head(blocks[0](self.stem(x), blocks[1:]))


@ZOO.alone
class BlockBypassed(Stack):
    """Uses the parts of its blocks without calling them."""

    def forward(self, x):
        x = self.stem(x)
        block: Any
        for block in self.blocks:
            x = x + block.down(F.silu(block.up(block.norm(x))))
        return self.head(x)


@ZOO.stacked
class DataMutation(Block):
    """Writes through `.data`, out of autograd's sight."""

    def forward(self, x):
        y = super().forward(x)
        y.data.clamp_(-1, 1)
        return y
