"""Code that waits at its call of a compiled model, and losses that replace the `forward` of the model they hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.base.torch_private import FakeTensor
from megatrain.errors import ExecuteError
from megatrain.integrations.hf.whole_calls import give_losses, has_forward_replaced
from megatrain.integrations.paused import CallsAgainError, DifferentiatesError, PausedCode, SpentError
from tests.comparing import assert_same

X = torch.ones(2, 4)


def compiled() -> Any:
    torch.manual_seed(0)
    return megatrain.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), device="cpu")


def paused(model: Any, code: Callable[[], Any]) -> PausedCode:
    made = PausedCode(model.megatrain, code)
    made.start()
    return made


def test_code_waits_where_it_calls_the_model_and_goes_on_with_the_result():
    model, order = compiled(), list[str]()

    def code() -> float:
        order.append("ahead")
        with torch.no_grad():
            assert model(X).shape == (2, 1)  # runs at once
        result = model(X, **{})
        order.append("behind")
        return float(result)

    waiting = paused(model, code)
    assert order == ["ahead"]
    assert waiting.call is not None
    assert waiting.call.args[0] is X
    assert waiting.give(torch.tensor(7.0)) == 7.0
    assert order == ["ahead", "behind"]
    with pytest.raises(SpentError):
        waiting.give(torch.tensor(7.0))


def of_parameter(model: Any, result: torch.Tensor) -> Any:
    return torch.autograd.grad(result.sum(), [model[0].weight])


def of_parameter_if_used(model: Any, result: torch.Tensor) -> Any:
    return torch.autograd.grad(result.sum(), [model[0].weight], allow_unused=True)


def into_parameter(model: Any, result: torch.Tensor) -> Any:
    return result.sum().backward(inputs=[model[0].weight])


@pytest.mark.parametrize("ask", [of_parameter, of_parameter_if_used, into_parameter])
def test_code_that_asks_for_gradients_through_the_model_is_told_and_can_be_ended(ask: Any):
    model, ended = compiled(), list[str]()

    def code() -> Any:
        try:
            return ask(model, model(X))
        except Exception:
            ended.append("it went on")
            raise
        finally:
            ended.append("ended")

    waiting = paused(model, code)
    with pytest.raises(DifferentiatesError):
        waiting.give(torch.ones(2, 1, requires_grad=True))
    assert ended == []
    waiting.abandon()
    assert ended == ["ended"]


def test_a_second_call_is_told_and_the_code_can_be_ended():
    model, ended = compiled(), list[str]()

    def code() -> Any:
        try:
            model(X)
            return model(X)
        finally:
            ended.append("finally")

    waiting = paused(model, code)
    with pytest.raises(CallsAgainError):
        waiting.give(torch.ones(()))
    assert not ended
    waiting.abandon()
    assert ended == ["finally"]
    waiting.abandon()  # once is enough


@pytest.mark.parametrize("is_behind", [False, True])
def test_errors_of_the_code_come_out_with_their_lines(is_behind: bool):
    model = compiled()

    def code() -> None:
        if is_behind:
            model(X)
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as raised:
        paused(model, code).give(torch.ones(()))
    assert any(entry.name == "code" for entry in raised.traceback)


def test_modes_around_the_call_are_told_and_the_default_device_is_the_callers():
    model = compiled()

    def code() -> str:
        with torch.autocast("cpu", torch.bfloat16):
            model(X)
        return str(torch.get_default_device())

    with torch.device("meta"):
        waiting = paused(model, code)
    assert waiting.call is not None
    assert waiting.call.modes == "autocast on cpu"
    assert waiting.give(torch.ones(())) == "meta"


def test_code_that_would_wait_for_the_step_that_waits_for_it_is_refused():
    model, other = compiled(), compiled()

    def code() -> Any:
        result = model(X)
        other(X)  # another model has a turn of its own
        model.state_dict()
        step.flush()
        return result

    def loss(result: torch.Tensor, batch: Any) -> torch.Tensor:
        return (result if isinstance(result, FakeTensor) else waiting.give(result)).sum()

    waiting = paused(model, code)
    step = megatrain.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    with pytest.raises(ExecuteError, match=r"flush\(\) was called while the model runs"):
        step(X)


# -- losses that replace `forward` ------------------------------------------------------------------------------------


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
