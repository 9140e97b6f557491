"""Models that break compilers by what they compute: transforms, values read by Python, foreign code."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.zoo.case import Family, Sample
from tests.zoo.handwritten import Block, Stack, X


class Adversarial(Family):
    """A family whose cases are named after their classes: `VmapBlock` is the case `x_vmap_block`."""

    def stacked(self, cls: type[nn.Module], **options: Any) -> type[nn.Module]:
        """Adds a stack of blocks of this class."""
        self.add(_case_name(cls), lambda: Stack(lambda _: cls()), X, **options)
        return cls

    def alone(self, cls: type[nn.Module], inputs: Any = X, **options: Any) -> type[nn.Module]:
        """Adds a model that is whole by itself."""
        self.add(_case_name(cls), cls, inputs, **options)
        return cls


def _case_name(cls: type) -> str:
    return "x" + "".join(f"_{c.lower()}" if c.isupper() else c for c in cls.__name__)


ZOO = Adversarial("adversarial")


@ZOO.alone
class VmapTop(Stack):
    def forward(self, x):
        return torch.func.vmap(super().forward, randomness="different")(x)


@ZOO.stacked
class InnerGrad(Block):
    """Uses the gradient of an energy as its activation, with a graph behind it."""

    def forward(self, x):
        y = super().forward(x)
        with torch.enable_grad():
            energy = self.up(y).square().sum()
            (force,) = torch.autograd.grad(energy, y, create_graph=True)
        return y - 0.1 * force


@ZOO.alone
class CheckpointReentrant(Stack):
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


@ZOO.stacked
class Nonzero(Block):
    """Runs on the positions that its own router picks."""

    def forward(self, x):
        flat = x.flatten(0, 1)
        picked = (flat.sum(-1) > 0).nonzero().squeeze(-1)
        return flat.index_add(0, picked, super().forward(flat[picked])).view_as(x)


@ZOO.stacked
class ComplexFft(Block):
    def forward(self, x):
        z = torch.fft.rfft(super().forward(x), dim=-1)
        gain = torch.polar(torch.ones(z.shape[-1]), torch.linspace(0, 1, z.shape[-1]))
        return torch.fft.irfft(z * gain.to(z.device), n=x.shape[-1], dim=-1)


@torch.library.custom_op("zoo::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


cube.register_fake(torch.empty_like)
cube.register_autograd(
    lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@ZOO.stacked
class CustomOp(Block):
    def forward(self, x):
        return super().forward(x) + 0.1 * cube(x.tanh())


@ZOO.stacked
class CompiledSub(Block):
    inner: Any

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["inner"] = torch.compile(super().forward, backend="eager")

    def forward(self, x):
        return self.inner(x)


def _gate(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) + x  # nothing that a fuser rounds in another way on a later run


@ZOO.stacked
class JitScript(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.jit.script(_gate)

    def forward(self, x):
        return super().forward(self.gate(x))


@ZOO.alone
class Layerdrop(Stack):
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if torch.rand([]) > 0.3:
                x = block(x)
        return self.head(x)


def _ragged(step: int) -> Sample:
    return (torch.randn(3, 5, 6), torch.tensor([5, 3, 2]) if step == 0 else torch.tensor([4, 4, 1])), {}


@functools.partial(ZOO.alone, inputs=_ragged)
class PackedRnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 8, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(8, 4)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        y, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(y)


@ZOO.alone
class MiscLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(5, 8, 3, padding=1, groups=1)
        self.norms = nn.ModuleList([nn.GroupNorm(2, 8), nn.InstanceNorm1d(8, affine=True), nn.BatchNorm1d(8)])
        self.act = nn.PReLU()
        self.rrelu = nn.RReLU()
        self.bilinear = nn.Bilinear(6, 6, 4)
        self.alpha = nn.AlphaDropout(0.1)

    def forward(self, x):
        y = self.conv(x)
        for norm in self.norms:
            y = self.rrelu(self.act(norm(y)))
        return self.alpha(self.bilinear(y, y.flip(1))).unfold(-1, 2, 1).cumsum(-1).logsumexp(-1)


@functools.partial(ZOO.alone, inputs=lambda _: ((torch.randint(0, 16, (2, 5)),), {}), optimizer="SGD")
class SparseEmb(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 6, sparse=True)
        self.rest = Stack()

    def forward(self, ids):
        return self.rest(self.embed(ids))
