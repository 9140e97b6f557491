"""Captures of models and values that no machine here could hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megatrain
from megatrain.tracer.recording import runner


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for a gibibyte."""
    monkeypatch.setattr(runner, "MOST_BYTES", 10000)


class Masked(nn.Module):
    def __init__(self, *, reads: bool = False):
        super().__init__()
        self.weight = nn.Linear(4, 4)
        self._reads = reads

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        index = torch.arange(x.shape[0])
        mask = (index[:, None] - index >= 0) & padding
        if self._reads and mask.all():
            return x
        if not padding.any():
            return x
        return torch.where(mask, 0.5, -1.0) @ self.weight(x)


def given(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    padding = torch.ones(tokens, dtype=torch.bool)
    padding[-1] = False
    return torch.ones(tokens, 4), padding


def test_masks_of_half_a_million_tokens_take_no_memory():
    """Each would take 256 GiB or more."""
    tokens = 1 << 19
    with torch.device("meta"):
        model, x = Masked(), torch.empty(tokens, 4)
    traced = megatrain.trace(model, (x, given(tokens)[1]))
    shapes = {node.meta["spec"].shape for node in traced.graph.nodes if "spec" in node.meta}
    assert (tokens, tokens) in shapes
    assert len(traced.guards) == 1  # small values are still there to be read


@pytest.mark.usefixtures("_small")
def test_the_capture_is_the_same(monkeypatch: pytest.MonkeyPatch):
    tokens = 200
    found = str(megatrain.trace(Masked(), given(tokens)))
    monkeypatch.setattr(runner, "MOST_BYTES", 1 << 30)
    assert str(megatrain.trace(Masked(), given(tokens))) == found


@pytest.mark.usefixtures("_small")
def test_what_python_reads_is_computed():
    """On the second attempt, also for a model without weights."""
    with torch.device("meta"):
        models = [Masked(reads=True), Masked(reads=True)]
    for model in (*models, Masked(reads=True)):
        traced = megatrain.trace(model, given(200))
        assert "guard __bool__(all_1) == False" in str(traced)
