"""Losses that replace their model's `forward` for a while: what they put there runs around the calls that stream."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import megatrain
from megatrain.integrations.hf.for_losses import has_forward_replaced
from megatrain.integrations.hf.whole_calls import give_losses
from tests.comparing import assert_same


class Keeps:
    """Calls the former `forward` for the first term, and cuts its result for the others."""

    def __init__(self, former: Any) -> None:
        self.former = former
        self.kept: torch.Tensor | None = None
        self.width = 4

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = self.former(x)
        return self.kept[:, : self.width]


class Inner(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()


class Several(nn.Module):
    """A loss of several widths of one result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.inner = Inner(model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        former = self.model.forward
        keeps = Keeps(former)
        try:
            self.model.forward = keeps
            losses = list[torch.Tensor]()
            for keeps.width in (4, 2, 1):
                losses.append(self.inner(x))
            return torch.stack(losses).sum()
        finally:
            self.model.forward = former


def made() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def test_what_a_loss_puts_in_place_of_forward_runs_around_the_call_that_streams():
    eager = made()
    recording = megatrain.Recording()
    model = copy.deepcopy(eager)
    losses = Several(eager), Several(model)
    compiled = megatrain.compile(model, device="cpu", transfer="copy", recording=recording)
    held = give_losses({"one": losses[1]}, compiled)
    assert losses[1].model is losses[1].inner.model is held
    for seed in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        before = len(recording.issued)
        found = [loss(x) for loss in losses]
        for loss in found:
            loss.backward()
        assert_same(found[1], found[0])
        assert sum(entry.stream == "compute" for entry in recording.issued[before:]) == 2 * len(compiled.program.blocks)
        assert not has_forward_replaced(held)
        gradients = [[p.grad for p in each.parameters()] for each in (model, eager)]
        assert_same(gradients[0], gradients[1])
        with torch.no_grad():
            for p in (*eager.parameters(), *model.parameters()):
                p.add_(p.grad, alpha=-0.1)
                p.grad = None
    assert "forward" not in vars(model)


def test_it_is_the_compiled_model_in_all_else():
    compiled = megatrain.compile(made(), device="cpu")
    held: Any = give_losses(None, compiled)
    assert held == compiled
    assert compiled == held
    assert held != megatrain.compile(made(), device="cpu")
    assert hash(held) == hash(compiled)
    assert issubclass(type(held), nn.Sequential)
    assert held[0] is compiled[0]
    assert_same(held.state_dict(), compiled.state_dict())
    held.eval()
    assert not compiled.training
    held.forward = around = Keeps(held.forward)
    assert held.forward is around
    assert has_forward_replaced(held)
    assert compiled.forward is not around
    del held.forward
    assert not has_forward_replaced(held)
    assert held.forward == compiled.forward
