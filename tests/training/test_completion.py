"""Completion: a marked tensor completes what owns it, once, whoever uses it."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import megatrain
from megatrain.checks.several_optimizers import parameters_of
from megatrain.errors import ExecuteError
from megatrain.training.completion import Completion
from tests.comparing import assert_same, snapshot
from tests.training.parity import SideBySide, sgd


class Owner:
    """Adds one to its tensors when it is flushed, and can fail to."""

    def __init__(self, *tensors: torch.Tensor):
        self.tensors = tensors
        self.is_due = True
        self.failures = 0
        self.completion = Completion(self.complete, self.changing)
        with self.completion.suspended():
            pass

    def changing(self) -> tuple[torch.Tensor, ...]:
        return self.tensors if self.is_due else ()

    def complete(self) -> None:
        if not self.is_due:
            return
        with self.completion.suspended():
            if self.failures > 0:
                self.failures -= 1
                raise RuntimeError("the update failed")
            with torch.no_grad():
                for tensor in self.tensors:
                    tensor.add_(1)
            self.is_due = False


class Named(nn.Parameter):
    """A user's own class, with its own idea of torch functions."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [nn.Parameter, torch.Tensor.clone, Named], ids=["parameter", "tensor", "own class"])
def test_of_any_class_and_its_own_again_afterwards(make: Any) -> None:
    tensor = make(torch.zeros(2))
    own = type(tensor)
    owner = Owner(tensor)
    assert isinstance(tensor, own)
    assert (tensor.shape, tensor.dtype, tensor.numel(), tensor.grad) == ((2,), torch.float32, 2, None)
    assert owner.is_due
    assert type(tensor) is not own
    assert_same(torch.ones(2) * 3, (tensor * 3).detach())
    assert type(tensor) is own
    if own is Named:
        assert torch.Tensor.mul in Named.seen  # its own function was asked, too


def test_one_use_completes_all() -> None:
    tensors = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    Owner(*tensors)  # gone, and with it what could flush: the tensors are ordinary again at the first use
    assert_same(torch.zeros(2), tensors[0].detach())
    owner = Owner(*tensors)
    assert_same(torch.ones(2), tensors[1].detach())
    assert not owner.is_due
    assert all(type(tensor) is nn.Parameter for tensor in tensors)


def test_what_fails_stays_due_and_nobody_sees_it_half_done() -> None:
    tensor = nn.Parameter(torch.zeros(2))
    owner = Owner(tensor)
    owner.failures = 2
    for read in (torch.Tensor.detach, copy.deepcopy):
        with pytest.raises(RuntimeError, match="the update failed"):
            read(tensor)
    assert owner.is_due
    assert_same(torch.ones(2), tensor.detach())


def test_copies_and_pickles_are_ordinary() -> None:
    tensors = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for tensor, copied in zip(
        tensors, (copy.deepcopy, copy.copy, lambda t: pickle.loads(pickle.dumps(t))), strict=True
    ):
        owner = Owner(tensor)
        made = copied(tensor)
        assert type(made) is nn.Parameter
        assert_same(torch.ones(2), made.detach())
        assert not owner.is_due
    for inert in (copy.deepcopy(owner.completion), pickle.loads(pickle.dumps(owner.completion))):
        owner.is_due = True
        inert()
        assert owner.is_due


def test_another_thread_that_looks_between_steps() -> None:
    """Its look takes the updates, or waits for the step that runs; the numbers are those without it."""
    sides = SideBySide.of("hazardous", sgd, max_grad_norm=0.5)
    found: list[BaseException] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.001):
            try:
                sides.optimizer.state_dict()
                next(sides.streamed.parameters()).detach().sum()
            except BaseException as error:
                found.append(error)
                return

    thread = threading.Thread(target=look)
    for number in range(30):
        if number == 2:  # a capture lends the parameters out, so it comes before
            thread.start()
        sides.take(torch.randn(3, 4, generator=torch.Generator().manual_seed(number)), seed=number)
    is_over.set()
    thread.join()
    assert not found
    assert_same(snapshot(sides.eager, sides.eager_optimizer), snapshot(sides.streamed, sides.optimizer))
    gc.collect()


LEFT_OVER: dict[str, Callable[[torch.Tensor, Any, Any], object]] = {
    "nothing": lambda loss, optimizer, scheduler: None,
    "step": lambda loss, optimizer, scheduler: optimizer.step(),
    "clip and step": lambda loss, optimizer, scheduler: (
        clip_grad_norm_(parameters_of(optimizer), 1),
        optimizer.step(),
    ),
    "zero_grad and scheduler": lambda loss, optimizer, scheduler: (optimizer.zero_grad(), scheduler.step()),
}


@pytest.mark.parametrize("name", LEFT_OVER)
def test_calls_of_a_loop_after_a_step_change_nothing_and_the_useless_ones_are_warned_of(name: str) -> None:
    models = [build_model(), build_model()]
    steps: list[Any] = []
    for model in models:
        compiled = megatrain.compile(model, device="cpu")
        optimizer = torch.optim.AdamW(compiled.parameters(), 0.1)
        steps.append((megatrain.TrainStep(compiled, optimizer, max_grad_norm=1.0), optimizer))
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _, optimizer in steps]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(3):
            batch = torch.full((2, 4), 1.0 + number)
            (step, optimizer), (plain, _) = steps
            LEFT_OVER[name](step(batch), optimizer, schedulers[0])
            plain(batch)
            if "scheduler" in name:
                schedulers[1].step()
    assert_same(dict(models[0].state_dict()), dict(models[1].state_dict()))
    texts = [str(each.message) for each in said if each.category is megatrain.TrainStepWarning]
    assert len(texts) == (name in ("step", "clip and step"))
    assert all(text.startswith("optimizer.step() finds no gradient: the training step before it") for text in texts)


def test_an_optimizers_own_step_is_not_warned_of_where_it_does_something() -> None:
    compiled = megatrain.compile(build_model(), device="cpu")
    optimizer = torch.optim.SGD(compiled.parameters(), 0.1)
    step = megatrain.TrainStep(compiled, optimizer)
    optimizer.step()  # before any training step, as some do to quiet a scheduler
    step(torch.ones(2, 4))
    before = compiled.state_dict()["0.weight"].clone()
    compiled(torch.ones(2, 4)).backward()
    optimizer.step()
    assert not torch.equal(before, compiled.state_dict()["0.weight"])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = compiled(torch.ones(2, 4))
        loss.backward()
        return loss

    optimizer.zero_grad()
    optimizer.step(closure)


def test_the_backward_of_a_steps_loss_is_refused_and_the_loss_is_like_any_else(tmp_path: Path) -> None:
    compiled = megatrain.compile(build_model(), device="cpu")
    step = megatrain.TrainStep(compiled, torch.optim.SGD(compiled.parameters(), 0.1))
    for batch in (torch.ones(2, 4), [torch.ones(2, 4), torch.zeros(1, 4)]):
        loss = step(batch)
        with pytest.raises(ExecuteError, match="step that returned this loss has run its backward") as caught:
            loss.backward(retain_graph=True)
        assert "optimizer.step()" in str(caught.value)
        with pytest.raises(RuntimeError, match="does not require grad"):
            (loss / 2).backward()
        torch.save({"loss": loss}, tmp_path / "loss.pt")
        loaded = torch.load(tmp_path / "loss.pt", weights_only=True)["loss"]
        for each in (loaded, copy.copy(loss), copy.deepcopy(loss), pickle.loads(pickle.dumps(loss)), loss + 0):
            assert type(each) is torch.Tensor
            assert float(each) == loss.item()
        assert not vars(loaded)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1), Mean())


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()
