"""What the tests of saving share: a model in the middle of training, and comparisons to the bit."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatrain.errors import CheckpointError
from megatrain.files import load, save


class Tied(nn.Module):
    """A tied matrix, a buffer, a frozen parameter, dropout."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.body = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.3)
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.norm(self.embed(ids))
        return self.head(self.drop(torch.tanh(self.body(x))) + self.frozen)


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int, scheduler: Any = None) -> None:
    for step in range(first, first + count):
        model.zero_grad()
        ids = batch(step)
        nn.functional.cross_entropy(model(ids), ids).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
    return torch.optim.AdamW([{"params": matrices, "lr": 3e-2}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)


def trained(seed: int = 0, steps: int = 3) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    optimizer = adamw(model)
    train(model, optimizer, 0, steps)
    return model, optimizer


@cache
def known(seed: int) -> tuple[Tied, torch.optim.Optimizer]:
    """What `trained` gives, for those who only read it."""
    return trained(seed)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return model.state_dict(keep_vars=True)


def save_trained(folder: Path, seed: int = 0, **options: Any) -> tuple[Tied, torch.optim.Optimizer]:
    model, optimizer = known(seed)
    save(folder, state_of(model), optimizer=optimizer, extra={"seed": seed}, **options)
    return model, optimizer


def same(a: Any, b: Any) -> bool:
    """Equal values of equal types, tensors bit for bit, NaN and the sign of zero included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
            a.detach().contiguous().reshape(-1).view(torch.uint8), b.detach().contiguous().reshape(-1).view(torch.uint8)
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "dtype"):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return repr(a) == repr(b)


def refusal(action: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


def assert_whole(folder: Path, *seeds: int) -> int:
    """Asserts that a checkpoint of one of these seeds is found, complete; returns the seed."""
    checkpoint = load(folder)
    checkpoint.check()
    seed = checkpoint.extra["seed"]
    assert seed in seeds
    model, optimizer = known(seed)
    again = Tied()
    checkpoint.read_weights(again.state_dict())
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    resumed = adamw(again)
    checkpoint.read_optimizer(resumed, dict(again.named_parameters()))
    assert same(resumed.state_dict(), optimizer.state_dict())
    return seed
