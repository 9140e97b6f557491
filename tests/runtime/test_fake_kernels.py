"""Operations whose rules for tensors without values are wrong are captured on values, and train as in eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from tests.comparing import assert_same_state


@torch.library.custom_op("megatrain_test::halve", mutates_args=())
def halve(x: torch.Tensor, fails: str) -> torch.Tensor:
    """A kernel that works; its rule for tensors without values fails, or gives other strides."""
    return (x * 0.5).contiguous()


@halve.register_fake
def _(x: torch.Tensor, fails: str) -> torch.Tensor:
    errors: dict[str, type[Exception]] = {
        "ValueError": ValueError,
        "AssertionError": AssertionError,
        "KeyError": KeyError,
    }
    if fails in errors:
        raise errors[fails]("the rule is wrong")
    return torch.empty_like(x).t().contiguous().t() if fails == "strides" else torch.empty_like(x)


def _backward(ctx: Any, gradient: torch.Tensor) -> Any:
    return gradient * 0.5, None


halve.register_autograd(_backward)


class Halving(nn.Module):
    def __init__(self, fails: str) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.megatrain_test.halve(self.fc(x), self.fails).view(-1).view(x.shape).relu()


@pytest.mark.parametrize("fails", ["ValueError", "AssertionError", "KeyError", "strides", ""])
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_rule_that_fails_where_its_kernel_works_is_no_reason_to_refuse(fails: str, activations: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Halving(fails) for _ in range(3)))
    eager = copy.deepcopy(model)
    compiled = megatrain.compile(model, device="cpu", transfer="copy", activations=activations)
    x = torch.randn(3, 4)
    for _ in range(2):
        found = [call(x) for call in (eager, compiled)]
        assert torch.equal(*found)
        for y in found:
            y.square().sum().backward()
        assert_same_state(eager, model)
    assert not compiled.program.opaque_calls


class Failing(nn.Module):
    """Fails with an error of its own, as itself."""

    def __init__(self, kind: type[Exception]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.kind = kind
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.fc(x)
        if self.kind is RuntimeError:
            return y @ y
        if self.kind is IndexError:
            return y[:, 7]
        raise self.kind("the model's own")


@pytest.mark.parametrize("kind", [RuntimeError, IndexError, ValueError, KeyError, LookupError])
def test_the_models_own_error_is_the_one_that_eager_raises(kind: type[Exception]) -> None:
    model, x = Failing(kind), torch.randn(3, 4)
    with pytest.raises(kind) as expected:
        copy.deepcopy(model)(x)
    compiled = megatrain.compile(model, device="cpu", transfer="copy")
    with pytest.raises(kind) as caught:
        compiled(x)
    assert type(caught.value) is type(expected.value)
    assert str(caught.value) == str(expected.value)
    assert caught.value.__cause__ is None
    assert model.calls == 0
