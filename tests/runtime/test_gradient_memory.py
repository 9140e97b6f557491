"""Gradients of plain calls land where they stay: once, page-locked, and never over one that the user keeps."""

from __future__ import annotations

import copy
import io
import random
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.runtime.gradients.sink import GradientSink
from tests.gradients import grad_of
from tests.models import MODELS
from tests.runtime.parity import assert_same, train
from tests.runtime.strict_toy import StrictToy
from tests.tiers import checkered
from tests.training.parity import MODES, TASKS, adamw


def made() -> tuple[nn.Module, nn.Module, Any, StrictToy]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    toy = StrictToy()
    return model, copy.deepcopy(model), megatrain.compile(model, device=toy, block_bytes="1KiB"), toy


def test_gradients_stay_where_they_land_and_the_memory_is_used_anew():
    model, _, compiled, toy = made()
    parameters = list(model.parameters())
    compiled(torch.ones(2, 16)).sum().backward()
    places = [grad_of(p).data_ptr() for p in parameters]
    assert all(toy.is_within(grad_of(p)) for p in parameters)
    assert [grad_of(p).untyped_storage().nbytes() for p in parameters] == [p.nbytes for p in parameters]
    assert not any(grad_of(p)._is_view() for p in parameters)
    file = io.BytesIO()
    torch.save(grad_of(parameters[1]), file)
    assert file.tell() < 4096, "not the gradients of all"
    num_locks = toy.num_locks
    for _ in range(3):
        model.zero_grad()
        compiled(torch.ones(2, 16)).sum().backward()
        assert [grad_of(p).data_ptr() for p in parameters] == places
    assert toy.num_locks == num_locks
    assert compiled.megatrain.engine.gradients.nbytes == sum(p.nbytes for p in parameters), "without a slab"


def test_a_gradient_that_somebody_keeps_is_not_overwritten():
    model, eager, compiled, _ = made()
    first, second = model[0][0].weight, model[1][0].weight
    x = torch.randn(2, 16)
    compiled(x).sum().backward()
    kept, array = grad_of(first), grad_of(second).numpy()
    values, numbers = kept.clone(), array.copy()
    for scale in (2, 3):
        model.zero_grad()
        eager.zero_grad()
        compiled(scale * x).sum().backward()
        eager(scale * x).sum().backward()
        assert torch.equal(kept, values)
        assert (array == numbers).all()
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(grad_of(mine), grad_of(other))
            assert grad_of(mine).data_ptr() not in (kept.data_ptr(), array.ctypes.data)


def test_a_gradient_that_is_only_added_is_not_copied_first(monkeypatch: pytest.MonkeyPatch):
    receive, kept = GradientSink.receive, list[bool]()

    def receiving(self: GradientSink, block: int, keys: Any, *rest: Any) -> None:
        kept.extend(map(self._keeps, keys))
        receive(self, block, keys, *rest)

    monkeypatch.setattr(GradientSink, "receive", receiving)
    model, _, compiled, _ = made()
    for is_first in (True, False):
        kept.clear()
        compiled(torch.ones(2, 16)).sum().backward()
        assert kept == [is_first] * len(list(model.parameters()))


def test_gradients_are_added_in_place_to_those_that_are_there():
    model, eager, compiled, _ = made()
    for number in range(3):
        x = torch.randn(2, 16)
        before = [p.grad for p in model.parameters()]
        compiled(x).sum().backward()
        eager(x).sum().backward()
        assert number == 0 or all(p.grad is b for p, b in zip(model.parameters(), before, strict=True))
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(grad_of(mine), grad_of(other))
    slab = max(b.landing_bytes for b in compiled.schedule.known_workload().blocks)
    total = sum(p.nbytes for p in model.parameters())
    assert compiled.megatrain.engine.gradients.nbytes == total + slab, "one slab for all shapes"


class Whims:
    """A user who keeps, drops, zeroes and replaces gradients of two equal models at random."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def act(self, mine: torch.Tensor, other: torch.Tensor) -> None:
        if mine.grad is None or other.grad is None:
            return
        action = self.draw.choice(["keep", "keep a part", "drop", "drop", "zero", "add", "replace"])
        if action == "keep":
            self.kept.append((mine.grad, other.grad))
        elif action == "keep a part":
            self.kept.append((mine.grad.flatten()[:1], other.grad.flatten()[:1]))
        if action in ("keep", "keep a part", "drop"):
            mine.grad = other.grad = None
        elif action == "zero":
            mine.grad.zero_()
            other.grad.zero_()
        elif action == "replace":
            mine.grad, other.grad = torch.ones_like(mine), torch.ones_like(other)


@pytest.mark.parametrize(
    ("name", "seed"), checkered(["gpt_loss", "tied_blocks", "mixture_of_experts", "cnn"], range(2))
)
def test_whatever_the_user_does_with_gradients_they_are_those_of_eager(name: str, seed: int):
    model, args, kwargs = MODELS[name]()
    eager = copy.deepcopy(model)
    compiled = megatrain.compile(model, device=StrictToy(), activations="recompute")
    pairs = [pair for pair in zip(model.parameters(), eager.parameters(), strict=True) if pair[0].requires_grad]
    whims = Whims(seed)
    for p in (p for pair in pairs[::5] for p in pair):
        p.register_hook(lambda grad: grad * 2)
    for _ in range(6):
        for pair in pairs:
            whims.act(*pair)
        assert_same(train(eager, eager, args, kwargs), train(compiled, model, args, kwargs))
        assert all(torch.equal(mine, other) for mine, other in whims.kept)


def test_gradients_that_the_caller_asks_for_are_his():
    model, _, compiled, _ = made()
    parameters = list(model.parameters())
    x = torch.randn(2, 16)
    one = torch.autograd.grad(compiled(x).sum(), parameters)
    values = [g.clone() for g in one]
    torch.autograd.grad(compiled(2 * x).sum(), parameters)
    compiled(3 * x).sum().backward()
    assert all(map(torch.equal, one, values))


def test_memory_is_locked_by_the_caller_and_only_in_the_first_steps_of_a_shape():
    task = TASKS["gpt"]
    for mode in MODES:
        model, toy, num_locks = task.build(), StrictToy(), 0
        compiled = megatrain.compile(model, device=toy, activations="offload")
        step = megatrain.TrainStep(compiled, adamw(model), loss=task.loss, **MODES[mode])
        for number in range(4):
            if number == 2:
                num_locks = toy.num_locks
            step(task.batch(number, 2 + number % 2))
        assert toy.num_locks == num_locks
        assert not any(name.startswith("megatrain") for name in toy.threads), mode


def test_calls_of_two_shapes_in_turn_lock_memory_once():
    task = TASKS["gpt"]
    assert task.loss is not None
    model, toy, num_locks = task.build(), StrictToy(), 0
    compiled = megatrain.compile(model, device=toy, activations="offload")
    for number in range(8):
        if number == 2:
            num_locks = toy.num_locks
        batch = task.batch(number, 2 + number % 2)
        task.loss(compiled(**batch), batch).backward()
        model.zero_grad()
    assert toy.num_locks == num_locks


def test_a_training_step_takes_over_from_plain_calls():
    model, _, compiled, toy = made()
    compiled(torch.ones(2, 16)).sum().backward()
    model.zero_grad()
    before = sum(toy.locked.values())
    step = megatrain.TrainStep(
        compiled, torch.optim.SGD(model.parameters()), loss=lambda out, _: out.sum(), overlap=False
    )
    step(torch.ones(2, 16))
    assert compiled.megatrain.engine.gradients.nbytes == 0
    assert sum(toy.locked.values()) <= before
