"""Calls that are alike are tried once, and each gets what its own trial would have given."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import fx, nn

import megatrain
from megatrain.passes.call_trial import Site, tried
from megatrain.passes.rewriter import Rewriter
from megatrain.tracer.spec import CALLS


class Three(nn.Module):
    """Calls of equal and of other operands, with and without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.long = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.one + x).sum() + (self.other + y).sum() + self.long.sum()


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that are tried."""
    found = list[Any]()

    def noted(target: Any, *others: Any) -> Any:
        found.append(target)
        return tried(target, *others)

    monkeypatch.setattr("megatrain.passes.rewriter.tried", noted)
    return found


def halves(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return one + other, other[2:]


def opened() -> tuple[Rewriter, list[fx.Node], dict[Any, fx.Node], Site]:
    """A rewriter, its inputs, its weights by name, and the place behind all calls."""
    rewriter = Rewriter(megatrain.trace(Three(), (torch.ones(4), torch.ones(4))))
    inputs = [node for node in rewriter.graph.nodes if node.op == "placeholder"]
    weights = {node.target: node for node in rewriter.graph.nodes if node.op == "get_attr"}
    last = next(node for node in reversed(rewriter.graph.nodes) if node.op in CALLS)
    return rewriter, inputs, weights, Site.of(last)


def described(made: Any) -> list[tuple[Any, ...]]:
    return [(part.meta["spec"], part.meta["requires_grad"], part.meta["storage_bytes"]) for part in made]


def test_results_share_the_memory_of_their_own_operands(trials: list[Any]):
    rewriter, (x, y), weights, site = opened()

    def added(*args: Any) -> Any:
        return rewriter.add(site, halves, args)

    first = added(x, weights["one"])
    second = added(y, weights["other"])
    assert len(trials) == 1
    assert described(first) == described(second)
    assert first[1].meta["storage"] == weights["one"].meta["storage"]
    assert second[1].meta["storage"] == weights["other"].meta["storage"]
    assert first[0].meta["storage"] != second[0].meta["storage"]


def test_other_operands_and_modes_are_tried(trials: list[Any]):
    rewriter, (x, y), weights, site = opened()

    def count(*args: Any, target: Any = halves, grad: bool = True) -> int:
        trials.clear()
        rewriter.add(Site(site.after, site.modules, site.source, grad, ()), target, args)
        return len(trials)

    assert count(x, weights["one"]) == 1
    assert count(weights["one"], x) == 1, "another one needs a gradient"
    assert count(x, x) == 1, "one tensor twice"
    assert count(y, y) == 0
    assert count(weights["long"], weights["long"]) == 1, "other shapes"
    assert count(x, weights["one"], grad=False) == 1
    assert count(x, weights["one"], target=partial(halves)) == 1, "another target"
    assert count(y, weights["other"]) == 0
