"""Mixtures of experts written by hand, one for each way in which a layer may read its stacked weights."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

IDLE = 3
"""The expert that the router never chooses."""


class Routed(nn.Module):
    """A router in front of experts, the residual stream around them; returns hidden states and a router loss."""

    def __init__(self, num_experts: int, width: int, inner: int, top_k: int = 2):
        super().__init__()
        self.top_k = top_k
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, width, inner) / width**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, inner, width) / inner**0.5)
        never = torch.zeros(num_experts)
        never[IDLE] = -1e9
        self.register_buffer("never", never)

    def forward(self, x):
        tokens = self.norm(x)
        scores = F.softmax(self.router(tokens) + self.never, dim=-1)
        weights, ids = scores.topk(self.top_k, dim=-1)
        return x + self.experts(tokens, scores, weights, ids), scores.square().mean()

    def experts(self, tokens, scores, weights, ids):
        raise NotImplementedError


def _gates(scores, weights, ids):
    return torch.zeros_like(scores).scatter(1, ids, weights)


class Bmm(Routed):
    """Every expert sees every token, scaled by its gate."""

    def experts(self, tokens, scores, weights, ids):
        count, width = tokens.shape
        gates = _gates(scores, weights, ids).t().reshape(-1, 1)
        rows = (tokens.repeat(self.up.shape[0], 1) * gates).view(self.up.shape[0], count, width)
        return torch.bmm(torch.bmm(rows, self.up).relu(), self.down).sum(0)


class Matmul(Bmm):
    """The same with `@` and transposed storage."""

    def experts(self, tokens, scores, weights, ids):
        gates = _gates(scores, weights, ids).t().unsqueeze(-1)
        rows = tokens.expand(self.up.shape[0], *tokens.shape) * gates
        return ((rows @ self.up).relu() @ self.down.transpose(-1, -2).mT).sum(dim=0)


class EinsumAligned(Routed):
    def experts(self, tokens, scores, weights, ids):
        rows = torch.einsum("te,th->eth", _gates(scores, weights, ids), tokens)
        inner = torch.einsum("eth,ehf->tef", rows, self.up).relu()
        return torch.einsum("tef,efh->teh", inner, self.down).sum(1)


class EinsumShared(Routed):
    """Experts share the tokens: their gradient is a sum over experts."""

    def experts(self, tokens, scores, weights, ids):
        inner = torch.einsum("th,ehf->etf", tokens, self.up).relu() * _gates(scores, weights, ids).t()[:, :, None]
        return torch.einsum("etf,efh->eth", inner, self.down).sum(0)


class MatmulShared(Routed):
    def experts(self, tokens, scores, weights, ids):
        inner = torch.matmul(tokens, self.up).relu() * _gates(scores, weights, ids).t()[:, :, None]
        return torch.bmm(inner, self.down).sum(0)


class Gathered(Routed):
    """Each token picks its experts' matrices."""

    def experts(self, tokens, scores, weights, ids):
        picked = ids.reshape(-1)
        rows = tokens.repeat_interleave(self.top_k, 0)
        inner = torch.bmm(rows.unsqueeze(1), self.up[picked]).squeeze(1).relu()
        found = torch.bmm(self.down[picked].transpose(1, 2), inner.unsqueeze(-1)).squeeze(-1)
        return (found * weights.reshape(-1, 1)).view(-1, self.top_k, tokens.shape[-1]).sum(1)


class Selected(Gathered):
    """The same with `index_select`, `einsum`, and one picked tensor that no product uses up at once."""

    def experts(self, tokens, scores, weights, ids):
        picked = ids.reshape(-1)
        rows = tokens.repeat_interleave(self.top_k, 0)
        inner = torch.einsum("sh,shf->sf", rows, self.up.index_select(0, picked)).relu()
        found = torch.einsum("sf,sfh->sh", inner, self.down[picked] * 1.5)
        return (found * weights.reshape(-1, 1)).view(-1, self.top_k, tokens.shape[-1]).sum(1)


class Looped(Routed):
    """A Python loop over rows of the stack, masked instead of indexed."""

    def experts(self, tokens, scores, weights, ids):
        gates = _gates(scores, weights, ids)
        total = torch.zeros_like(tokens)
        for expert in range(self.up.shape[0]):
            inner = (tokens @ self.up[expert]).relu()
            total = total + (inner @ self.down.select(0, expert)) * gates[:, expert, None]
        return total


class Grouped(Routed):
    """Tokens sorted by expert, one grouped product for all."""

    def experts(self, tokens, scores, weights, ids):
        order = ids.reshape(-1).argsort(stable=True)
        counts = torch.histc(ids.float(), bins=self.up.shape[0], min=0, max=self.up.shape[0] - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = tokens[order // self.top_k]
        inner = torch._grouped_mm(rows, self.up, offs=ends).relu()
        found = torch._grouped_mm(inner, self.down, offs=ends) * weights.reshape(-1)[order, None]
        back = torch.empty_like(found).index_copy(0, order, found)
        return back.view(-1, self.top_k, tokens.shape[-1]).sum(1)


class Listed(nn.Module):
    """Experts as modules of a list, masked."""

    def __init__(self, num_experts: int, width: int, inner: int, top_k: int = 2):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(width, num_experts, bias=False)
        self.list = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width)) for _ in range(num_experts)
        )

    def forward(self, x):
        scores = F.softmax(self.router(x), dim=-1)
        weights, ids = scores.topk(self.top_k, dim=-1)
        gates = _gates(scores, weights, ids)
        total = x
        for expert, module in enumerate(self.list):
            total = total + module(x) * gates[:, expert, None]
        return total, scores.square().mean()


class Layers(nn.Module):
    """A few layers of one kind; with `is_shared` one layer, called again and again."""

    KINDS: ClassVar[dict[str, type[nn.Module]]] = {
        "bmm": Bmm,
        "matmul": Matmul,
        "einsum": EinsumAligned,
        "gathered": Gathered,
        "selected": Selected,
        "looped": Looped,
    }
    SHARED: ClassVar[dict[str, type[nn.Module]]] = {"einsum": EinsumShared, "matmul": MatmulShared}

    def __init__(self, kind: Any, depth: int, *sizes: int, is_shared: bool = False):
        super().__init__()
        layers = [kind(*sizes) for _ in range(1 if is_shared else depth)]
        self.layers = nn.ModuleList(layers * depth if is_shared else layers)

    def forward(self, x):
        losses = []
        for layer in self.layers:
            x, loss = layer(x)
            losses.append(loss)
        return x, torch.stack(losses).sum()
