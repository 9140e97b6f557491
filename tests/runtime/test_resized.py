"""Parameters that get another shape between two calls, as when a vocabulary grows, are taken in as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import megatrain


class Tied(nn.Module):
    """An embedding that is also the head, around layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def _resized(model: Tied, size: int) -> torch.Tensor:
    old = model.embedding.weight.detach()
    new = torch.linspace(-1, 1, size * 8).view(size, 8)
    new[: min(size, len(old))] = old[:size]
    return new


def _new_modules(model: Tied, size: int) -> None:
    weight = _resized(model, size)
    model.embedding = nn.Embedding(size, 8, _weight=weight)
    model.head = nn.Linear(8, size, bias=False)
    model.head.weight = model.embedding.weight


def _new_parameter(model: Tied, size: int) -> None:
    model.embedding.weight = model.head.weight = nn.Parameter(_resized(model, size))


def _new_data(model: Tied, size: int) -> None:
    model.embedding.weight.grad = None
    model.embedding.weight.data = _resized(model, size)
    model.embedding.num_embeddings = model.head.out_features = size


WAYS = (_new_modules, _new_parameter, _new_data)


@pytest.mark.parametrize(("resize", "transfer"), list(zip(WAYS, ("copy", "bind", "copy"), strict=True)))
def test_a_resized_embedding_trains_as_in_eager(resize: Callable[[Tied, int], None], transfer: str) -> None:
    torch.manual_seed(0)
    model = Tied()
    eager = copy.deepcopy(model)
    compiled = megatrain.compile(model, device="cpu", transfer=transfer, activations="recompute")
    for size in (12, 12, 15, 15, 12, 7):
        for each in (eager, model):
            if len(each.embedding.weight) != size:
                resize(each, size)
        ids = torch.arange(6).view(2, 3) % size
        found = [call(ids) for call in (eager, compiled)]
        assert found[1].shape == (2, 3, size)
        assert torch.equal(*found)
        for each, y in zip((eager, model), found, strict=True):
            each.zero_grad()
            y.square().sum().backward()
            torch.optim.SGD(each.parameters(), lr=0.1).step()
        del found, y
        for theirs, ours in zip(eager.parameters(), model.parameters(), strict=True):
            assert torch.equal(theirs, ours)
    assert len(list(compiled.megatrain._variants)) == 1  # those for other shapes are gone
    assert model.state_dict().keys() == eager.state_dict().keys()
