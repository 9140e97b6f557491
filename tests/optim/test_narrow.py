"""A compile that fails while it narrows, anywhere, gives the fp32 model back with all its bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.optim.masters import halves, narrow_model
from megatrain.optim.masters.narrow_model import Narrowed
from tests.comparing import assert_same_bits
from tests.gradients import grad_of

KINDS = ("exact", "rounded")


def awkward(*shape: int) -> torch.Tensor:
    """Random values, and ties of both signs and both parities: between two bf16 values, next to zero, to infinity."""
    values = torch.randn(*shape)
    bits = [0x3F808000, 0x3F818000, 0x00008000, 0x7F7F8000, 0x7F800000, 0x00000001, 0x7F7FFFFF]
    bits += [b - 2**31 for b in bits]
    flat = values.view(-1)
    flat[: len(bits)] = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    return values


class Mixed(nn.Module):
    """Trained and frozen parameters, in another order of memory, shared, and with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)
        self.frozen = nn.Parameter(awkward(4, 5), requires_grad=False)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.again = self.layer
        self.empty = nn.Parameter(torch.empty(0))
        with torch.no_grad():
            self.layer.weight.copy_(awkward(5, 4))
        self.layer.weight.grad = awkward(5, 4)
        self.conv.weight.grad = awkward(3, 2, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer.weight.grad is not None:  # refused, when it is captured
            x = x + self.layer.weight.grad.sum()
        return self.layer(x) @ self.frozen.T


class State:
    """What a model was, to be compared with what it is."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.values = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.gradients = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}

    def check(self, where: object) -> None:
        found = dict(self.model.named_parameters())
        assert all(found[name] is p for name, p in self.parameters.items()), where
        for name, p in found.items():
            assert p.dtype == torch.float32, (where, name)
            assert_same_bits(self.values[name], p, str((where, name)))
        for name in found.keys() - self.gradients.keys():
            assert found[name].grad is None, (where, name)
        for name, gradient in self.gradients.items():
            assert found[name].grad is not None, (where, name)
            assert_same_bits(gradient, grad_of(found[name]), str((where, name)))
        assert narrow_model._OF_MODELS.get(self.model) is None, where


def attempt(model: nn.Module, kind: str, *, captures: bool = False) -> Any:
    arguments: dict[str, Any] = {"example_args": (torch.ones(2, 4),)} if captures else {}
    return megatrain.compile(model, device="cpu", precision="bf16", masters=kind, **arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_an_allocation_that_fails_leaves_the_model_as_it_was(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Mixed()
    state = State(model)
    original = torch.empty_like
    for at in range(1, 100):
        count = 0

        def failing(*args: Any, at: int = at, **kwargs: Any) -> torch.Tensor:
            nonlocal count
            count += 1
            if count == at:
                raise MemoryError("out of memory")
            return original(*args, **kwargs)

        monkeypatch.setattr(torch, "empty_like", failing)
        try:
            attempt(model, kind)
        except MemoryError:
            state.check(at)
            continue
        assert at > 10
        break
    monkeypatch.undo()
    compiled = megatrain.compile(model, device="cpu", precision="bf16", masters=kind)
    if kind == "exact":
        master = compiled.masters[model.layer.weight]
        assert_same_bits(state.values["layer.weight"], narrow_read(master), "master")
    assert torch.equal(model.frozen, state.values["frozen"].bfloat16())  # as torch rounds


def narrow_read(master: Any) -> torch.Tensor:
    return halves.read_(torch.empty(master.shape), master)


@pytest.mark.parametrize("is_master", [True, False])
def test_a_narrowed_tensor_has_its_bits_back(is_master: bool) -> None:
    values = awkward(8, 5)
    found = Narrowed.of(values.T, is_master=is_master)
    assert_same_bits(values.T, found.widened(), "widened")
    if not is_master:
        assert_same_bits(values.T.bfloat16(), found.high, "narrowed")
        assert found.ties is not None
