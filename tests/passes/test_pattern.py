"""Patterns: what they find, and all that they must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.errors import LowerError
from megatrain.passes import Match, Rewriter

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A linear layer, and what a test's function makes of it."""

    def __init__(self, form: Callable[..., Any], bias: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6, bias=bias)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(4, 6))
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(self, x)


def found(form: Callable[..., Any], pattern: Callable[..., Any], *, bias: bool = True, **options: Any) -> list[Match]:
    return Rewriter(megatrain.trace(Net(form, bias), (X,))).matches(pattern, **options)


def capped(hidden: Any, weight: Any, bias: Any, cap: Any) -> Any:
    return torch.tanh(F.linear(hidden, weight, bias) / cap) * cap


def test_parameters_stand_for_tensors_and_numbers():
    (match,) = found(lambda m, x: torch.tanh(m.fc(x) / 30.0) * 30.0, capped)
    assert [str(match[name]) for name in ("hidden", "weight", "bias", "cap")] == ["x", "fc_weight", "fc_bias", "30.0"]
    assert [node.name for node in match.calls] == ["linear", "div", "tanh", "mul"]
    assert match.result is match.calls[-1]
    assert str(match) == "mul: tanh.mul(30.0), where hidden = x, weight = fc.weight, bias = fc.bias, cap = 30.0"


def test_a_parameter_that_stands_twice_is_the_same_in_both_places():
    assert not found(lambda m, x: torch.tanh(m.fc(x) / 30.0) * 30, capped)
    assert found(lambda m, x: m.fc(x) * m.fc.bias, lambda x, w, b: F.linear(x, w, b) * b)
    assert not found(lambda m, x: m.fc(x) * m.fc.weight[0], lambda x, w, b: F.linear(x, w, b) * b)


def test_calls_may_stand_between_where_a_pattern_says_so():
    def relu(x: Any, w: Any, b: Any) -> Any:
        return F.relu(F.linear(x, w, b))

    def form(m: Any, x: Any) -> Any:
        return F.relu(m.fc(x).view(-1).reshape(4, 6))

    assert not found(form, relu)
    assert not found(form, relu, through=("view",))
    (match,) = found(form, relu, through=("view", "reshape"))
    assert [node.name for node in match.calls] == ["linear", "view", "reshape", "relu"]
    (match,) = found(lambda m, x: F.relu(m.fc(x)).view(-1), relu, through=("view",))
    assert match.result.name == "relu"


def test_every_place_is_found_and_no_call_is_in_two_matches():
    matches = found(lambda m, x: m.fc(m.fc(x)) * 2, lambda x, w, b: F.linear(x, w, b))
    assert [match.result.name for match in matches] == ["linear", "linear_1"]
    pairs = found(lambda m, x: ((x + 1) + 1) + 1, lambda x: (x + 1) + 1)
    assert [[node.name for node in match.calls] for match in pairs] == [["add", "add_1"]]


def read_twice(m: Any, x: Any) -> Any:
    y = m.fc(x)
    return F.relu(y) + y


def returned(m: Any, x: Any) -> Any:
    y = m.fc(x)
    return F.relu(y), y


def kept_in_a_buffer(m: Any, x: Any) -> Any:
    y = m.fc(x)
    m.seen = y.detach()
    return F.relu(y)


def written_on_the_way(m: Any, x: Any) -> Any:
    y = m.fc(x)
    y.add_(1)
    return F.relu(y)


def operand_written_later(m: Any, x: Any) -> Any:
    hidden = x + 1
    y = F.linear(hidden, m.fc.weight.detach(), m.fc.bias)
    hidden.mul_(2)
    return F.relu(y) + hidden


def in_two_modes(m: Any, x: Any) -> Any:
    y = m.fc(x)
    with torch.no_grad():
        return F.relu(y), x * m.fc.bias


def half_under_autocast(m: Any, x: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = m.fc(x)
    return F.relu(y)


NEAR_MISSES = [
    read_twice, returned, kept_in_a_buffer, written_on_the_way, operand_written_later,
    in_two_modes, half_under_autocast,
]  # fmt: skip


@pytest.mark.parametrize("form", NEAR_MISSES, ids=lambda form: form.__name__)
def test_what_would_be_wrong_to_replace_is_no_match(form: Callable[..., Any]):
    assert not found(form, lambda x, w, b: F.relu(F.linear(x, w, b)), through=("detach",))
    assert found(lambda m, x: F.relu(m.fc(x)), lambda x, w, b: F.relu(F.linear(x, w, b)))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (lambda x: x, "returns its parameter"),
        (torch.neg, "have no names"),
        (lambda *x: x[0] + 1, "have no names"),
        (lambda x: 3, "returns something else than a tensor"),
        (lambda x: (x + 1, x), "returns something else than a tensor"),
        (lambda x: x.view(-1, x.shape[-1]), "asks for `shape`"),
        (lambda x: x if x > 0 else -x, "asks for `bool`"),
        (lambda x: x + x.item(), "asks for `item`"),
        (lambda x: x.view(x.size(0), -1), "asks for `size`"),
        (lambda x: x / torch.numel(x), "asks for `numel`"),
    ],
)
def test_a_pattern_without_an_answer_is_refused(pattern: Callable[..., Any], words: str):
    with pytest.raises(LowerError, match=words):
        found(lambda m, x: m.fc(x), pattern)


def test_what_stands_between_must_be_calls():
    with pytest.raises(LowerError, match="no method"):
        found(lambda m, x: m.fc(x), lambda x: x + 1, through=("reshaped",))
