"""Habits of training code that compilers meet rarely: state in buffers, moving averages, odd tensors, user's hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.adversarial import Adversarial
from tests.zoo.case import Sample
from tests.zoo.handwritten import Block, Stack

ZOO = Adversarial("extra")


@ZOO.stacked
class SavedTensorHooks(Block):
    """Keeps activations in half precision, so gradients depend on the hooks."""

    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            return super().forward(x)


def _halve_gradient(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@ZOO.alone
class PostAccumulateHook(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_post_accumulate_grad_hook(_halve_gradient)


@ZOO.alone
class MomentumTeacher(nn.Module):
    """Updates a teacher's parameters inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Stack(), Stack().requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            target = self.teacher(x)
        return F.mse_loss(self.student(x), target)


@ZOO.alone
class Queue(nn.Module):
    """A queue of negatives with a pointer, both buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = Stack()
        self.register_buffer("queue", torch.randn(9, 4))
        self.queue: torch.Tensor
        self.pointer: torch.Tensor
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        keys = self.encode(x).mean(1)
        logits = keys @ self.queue.clone().T
        with torch.no_grad():
            at = int(self.pointer)
            self.queue[at : at + 3] = keys.detach()
            self.pointer[0] = (at + 3) % 9
        return logits.logsumexp(-1).mean()


@ZOO.alone
class Quantizer(nn.Module):
    """A codebook learned by moving averages, with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = Stack(), nn.Linear(4, 6)
        self.codes: torch.Tensor
        self.counts: torch.Tensor
        self.register_buffer("codes", torch.randn(7, 4))
        self.register_buffer("counts", torch.ones(7))

    def forward(self, x):
        z = self.encode(x)
        flat = z.reshape(-1, 4)
        hot = F.one_hot(torch.cdist(flat, self.codes).argmin(-1), 7).type_as(flat)
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.codes.mul_(0.9).add_(hot.T @ flat / self.counts[:, None], alpha=0.1)
        q = (hot @ self.codes).view_as(z)
        return self.decode(z + (q - z).detach()), F.mse_loss(z, q.detach())


@ZOO.alone
class FastWeights(nn.Module):
    """Takes one inner step on its own weights and runs with the result."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stack(lambda _: Block(p=0.0))

    def forward(self, x):
        names, values = zip(*self.net.named_parameters(), strict=True)
        loss = torch.func.functional_call(self.net, dict(zip(names, values, strict=True)), (x,)).square().mean()
        grads = torch.autograd.grad(loss, values, create_graph=True)
        fast = {n: p - 0.1 * g for n, p, g in zip(names, values, grads, strict=True)}
        return torch.func.functional_call(self.net, fast, (x,))


@ZOO.alone
class ParameterKinds(nn.Module):
    """Parameters in lists and dicts, in double precision and complex, a scalar one, and one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList(nn.Parameter(torch.randn(6)) for _ in range(3))
        self.named = nn.ParameterDict({"a": torch.randn(6, dtype=torch.float64), "unused": torch.randn(2)})
        self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        for weight in self.many:
            x = torch.tanh(x * weight) * self.scale
        return (x.double() * self.named["a"]).float() + (x * self.phase).abs()


def _bags(_: int) -> Sample:
    return (torch.randint(0, 16, (12,)), torch.tensor([0, 4, 9])), {}


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(16, 6, mode="mean", padding_idx=0)
        self.sum = nn.Embedding(16, 6, padding_idx=0, max_norm=1.0)
        self.rest = Stack()

    def forward(self, ids, offsets):
        return self.rest(self.bag(ids, offsets)[None] + self.sum(ids[:3]))


ZOO.add("embedding_bag", Bag, _bags)


@ZOO.stacked
class Gumbel(Block):
    def forward(self, x):
        gates = F.gumbel_softmax(self.up(x), hard=True)
        return super().forward(x) + gates[..., :8] * torch.rand_like(x) + torch.randperm(8).float()


@ZOO.alone
class Attended(nn.Module):
    """nn.MultiheadAttention with weights returned, masks of both kinds, and added bias rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(6, 2, dropout=0.1, batch_first=True, add_bias_kv=True) for _ in range(2)
        )

    def forward(self, x):
        causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
        weights: list[Any] = []
        for layer in self.layers:
            y, w = layer(x, x, x, attn_mask=causal, need_weights=True, average_attn_weights=False)
            x = x + y
            weights.append(w)
        return x, weights
