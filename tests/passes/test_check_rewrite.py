"""check_rewrite: a rewrite is right on all weights and inputs, or told to be wrong by the tensor that shows it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.errors import LowerError, OptionError
from megatrain.passes import Rewriter, check_rewrite
from megatrain.passes.rewrites.head_loss import chunk_head_loss

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A bias of zeros, a norm of ones, a buffer that is written, dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        nn.init.zeros_(self.fc.bias)
        self.total: torch.Tensor
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norm(F.dropout(F.linear(x, self.fc.weight, self.fc.bias), 0.2))
        with torch.no_grad():
            self.total.add_(y.sum())
        return y if labels is None else y.square() * labels.unsqueeze(1)


def replacing(target: Any, change: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    def rewritten(traced: megatrain.TracedModule) -> megatrain.TracedModule:
        rewriter = Rewriter(traced)
        for node in rewriter.calls(target):
            rewriter.replace(node, change(partial(rewriter.call, node), node))
        return rewriter.done()

    return rewritten


def apart(add: Any, node: Any) -> Any:
    x, weight, bias = node.args
    return add("add", add(F.linear, x, weight), bias)


def without_bias(add: Any, node: Any) -> Any:
    return add(F.linear, *node.args[:2])


def detached(add: Any, node: Any) -> Any:
    x, weight, bias = node.args
    return add(F.linear, x, add("detach", weight), bias)


def test_a_right_rewrite_is_equal_on_every_trial():
    report = check_rewrite(Net(), replacing(F.linear, apart), (X.clone().requires_grad_(),), trials=4)
    assert report.ok
    assert report.trials == 4
    kinds = {(d.kind, d.name) for d in report.deviations}
    assert {("gradient", "fc.bias"), ("input gradient", "x"), ("buffer", "total"), ("output", "0")} <= kinds
    assert str(report).startswith("rewritten of Net: equal; ")


def test_a_bias_that_begins_with_zeros_does_not_hide_its_loss():
    report = check_rewrite(Net(), replacing(F.linear, without_bias), (X,), trials=1)
    assert not report.ok
    wrong = {(d.kind, d.name) for d in report.deviations if not d.ok}
    assert {("output", "0"), ("gradient", "fc.bias")} <= wrong
    assert "gradient fc.bias: has no gradient" in str(report)
    assert "rewritten of Net: DIFFERENT; " in str(report)


def test_a_gradient_that_is_lost_is_told_although_the_outputs_are_equal():
    report = check_rewrite(Net().eval(), replacing(F.linear, detached), (X,), trials=1)
    assert not report.ok
    assert [(d.kind, d.name) for d in report.deviations if not d.ok] == [("gradient", "fc.weight")]


def test_a_model_whose_way_depends_on_its_weights_is_refused():
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)
            self.level = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) if self.level == 1 else x

    with pytest.raises(LowerError, match=r"(?s)the way that the model takes depends on values: .*megatrain\.verify"):
        check_rewrite(Branching(), replacing(F.linear, apart), (X,))


def test_a_rewrite_that_changes_nothing_is_not_ok():
    report = check_rewrite(Net(), lambda traced: traced, (X,))
    assert not report.ok
    assert not report.changed
    assert str(report) == "<lambda> leaves Net as it is; nothing was compared"


def test_tolerance_nought_asks_for_the_same_bits():
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(24, 300)

        def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(hidden), labels)

    given = torch.randn(200, 24), torch.randint(300, (200,))
    chunked = partial(chunk_head_loss, rows=40)
    assert check_rewrite(Head(), chunked, given).ok
    report = check_rewrite(Head(), chunked, given, tolerance=0)
    assert {d.kind for d in report.deviations if not d.ok} <= {"gradient"}, "the rewrite keeps all other bits"


def test_the_model_and_the_generators_stay_as_they_were():
    model, state = Net(), torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check_rewrite(model, replacing(F.linear, apart), (X,))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_what_breaks_a_rule_is_refused_by_its_name():
    with pytest.raises(LowerError, match="the pass `forgets` returned None"):
        check_rewrite(Net(), forgets, (X,))
    with pytest.raises(LowerError, match=r"`fc\.weight` is on the meta device"):
        check_rewrite(Net().to("meta"), replacing(F.linear, apart), (X.to("meta"),))
    with pytest.raises(OptionError, match=r"^trials"):
        check_rewrite(Net(), replacing(F.linear, apart), (X,), trials=0)


def forgets(traced: megatrain.TracedModule) -> Any:
    Rewriter(traced).done()
