"""Updates that are due are taken before anybody sees the parameters; and what else happens between steps."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import ExecuteError
from tests.comparing import assert_same, snapshot
from tests.training.parity import (
    MODES,
    TASKS,
    TELLING_MODES,
    SideBySide,
    adamw,
    fresh,
    loop_step,
    own_loss,
    sgd,
    square,
)

TASK = TASKS["hazardous"]
WEIGHT = "layers.0.fc.weight"


def batch(step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def due(optimizer: Any = sgd, **options: Any) -> SideBySide:
    """Three steps, the updates of the third not taken."""
    sides = SideBySide.of("hazardous", optimizer, **{"max_grad_norm": 0.5, **options})
    sides.take(batch(0), seed=0)
    alias = sides.streamed.get_parameter(WEIGHT).data  # the same memory; nobody knows who looks at it
    sides.take(batch(1), seed=1)
    sides.take(batch(2), seed=2)
    assert sides.step.schedule.kind.updates == "deferred"
    assert not torch.equal(alias, sides.eager.get_parameter(WEIGHT)), "nothing is due"
    return sides


def through_apply(compiled: Any) -> torch.Tensor:
    found: list[torch.Tensor] = []
    compiled.apply(lambda module: found.append(module.weight.clone()) if isinstance(module, nn.Linear) else None)
    return found[0]


READS: dict[str, Callable[[Any], torch.Tensor]] = {
    "parameters": lambda c: next(p for p in c.parameters()),
    "named_parameters": lambda c: dict(c.named_parameters())[WEIGHT],
    "state_dict": lambda c: c.state_dict()[WEIGHT],
    "attribute": lambda c: c.layers[0].fc.weight,
    "get_parameter": lambda c: c.get_parameter(WEIGHT),
    "get_submodule": lambda c: c.get_submodule("layers.0.fc").weight,
    "modules": lambda c: next(m for m in c.modules() if isinstance(m, nn.Linear)).weight,
    "named_modules": lambda c: dict(c.named_modules())["layers.0.fc"].weight,
    "children": lambda c: next(c.children())[0].fc.weight,
    "named_children": lambda c: dict(c.named_children())["layers"][0].fc.weight,
    "apply": through_apply,
    "copy": lambda c: torch.nn.utils.parameters_to_vector(c.parameters())[:16].view(4, 4),
}


@pytest.mark.parametrize("read", READS)
def test_every_read_through_the_compiled_model_sees_the_updates(read: str) -> None:
    sides = due()
    assert_same(sides.eager.get_parameter(WEIGHT).detach().clone(), READS[read](sides.compiled).detach().clone(), read)
    assert_same(snapshot(sides.eager, sides.eager_optimizer), snapshot(sides.streamed, sides.optimizer))
    sides.take(batch(2), seed=2)
    sides.assert_same()


def test_an_evaluation_sees_the_updates() -> None:
    sides = due()
    sides.compiled.eval()
    sides.eager.eval()
    with torch.no_grad():
        assert_same(sides.eager(batch(9)), sides.compiled(batch(9)))
    sides.compiled.train()
    sides.eager.train()
    sides.take(batch(2), seed=2)
    sides.take(batch(3), seed=3)
    sides.assert_same()


def test_what_is_loaded_is_not_updated_from_before() -> None:
    sides = due()
    other = {
        name: value + 0.25 if value.is_floating_point() else value for name, value in TASK.build().state_dict().items()
    }
    for model in (sides.eager, sides.compiled):
        model.load_state_dict(copy.deepcopy(other))
    assert_same(snapshot(sides.eager), snapshot(sides.streamed))
    sides.take(batch(2), seed=2)
    sides.assert_same()


def test_a_value_written_in_place_is_not_lost() -> None:
    sides = due()
    with torch.no_grad():
        for model in (sides.eager, sides.compiled):
            model.get_parameter(WEIGHT).mul_(0.5)
    sides.take(batch(2), seed=2)
    sides.assert_same()


def averaged(sides: SideBySide) -> torch.Tensor:
    copied = torch.optim.swa_utils.AveragedModel(TASK.build())
    copied.update_parameters(sides.streamed)
    return copied.module.get_parameter(WEIGHT)


READS_BESIDE: dict[str, Callable[[SideBySide, nn.Parameter], torch.Tensor]] = {
    "the model's attribute": lambda sides, _: sides.streamed.layers[0].fc.weight * 1,
    "the model's state dict": lambda sides, _: sides.streamed.state_dict()[WEIGHT],
    "the model itself": lambda sides, _: sides.streamed.layers[0].fc(torch.eye(4)),
    "a copy of the model": lambda sides, _: copy.deepcopy(sides.streamed).get_parameter(WEIGHT),
    "a pickled model": lambda sides, _: pickle.loads(pickle.dumps(sides.streamed)).get_parameter(WEIGHT),
    "a moving average": lambda sides, _: averaged(sides),
    "the optimizer's groups": lambda sides, held: next(
        p for p in sides.optimizer.param_groups[0]["params"] if p is held
    ).clone(),
    "a tensor held since before": lambda _, held: held.detach(),
    "its data": lambda _, held: held.data,
    "its copy": lambda _, held: copy.deepcopy(held),
    "its pickle": lambda _, held: pickle.loads(pickle.dumps(held)),
    "its norm, with others": lambda _, held: torch.stack(torch._foreach_norm([held, held])),
    "its text": lambda _, held: torch.tensor([ord(c) for c in repr(held)]),
    "its numbers": lambda _, held: torch.from_numpy(held.detach().numpy()),
}


@pytest.mark.parametrize("read", READS_BESIDE)
def test_every_read_past_the_compiled_model_sees_the_updates(read: str) -> None:
    sides = due()
    held = sides.streamed.layers[0].fc.weight
    seen = READS_BESIDE[read](sides, held).detach().clone()
    assert_same(snapshot(sides.eager, sides.eager_optimizer), snapshot(sides.streamed, sides.optimizer))
    assert_same(READS_BESIDE[read](sides, held).detach(), seen, read)
    assert type(held) is nn.Parameter
    sides.take(batch(2), seed=2)
    sides.assert_same()


WRITES: dict[str, Callable[[Any, nn.Parameter, torch.optim.Optimizer], object]] = {
    "in place": lambda _, held, __: held.clamp_(-0.1, 0.1),
    "through its data": lambda _, held, __: held.data.mul_(0.5),
    "new data": lambda _, held, __: setattr(held, "data", torch.ones(4, 4)),
    "through the groups": lambda _, __, optimizer: [p.mul_(0.5) for p in optimizer.param_groups[0]["params"]],
    "load_state_dict": lambda model, _, __: model.load_state_dict(
        {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
    ),
    "an initializer": lambda _, held, __: nn.init.eye_(held),
    "a moment": lambda _, held, optimizer: optimizer.state[held]["momentum_buffer"].zero_(),
    "freezing": lambda model, _, __: model.layers[0].requires_grad_(False),
    "another parameter": lambda model, held, __: setattr(model.layers[0].fc, "bias", nn.Parameter(torch.ones(4))),
}


@pytest.mark.parametrize("write", WRITES)
def test_every_write_past_the_compiled_model_comes_behind_the_updates(write: str) -> None:
    sides = due(lambda model: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    with torch.no_grad():
        for model, optimizer in ((sides.eager, sides.eager_optimizer), (sides.streamed, sides.optimizer)):
            WRITES[write](model, model.layers[0].fc.weight, optimizer)
    for number in (2, 3):
        sides.take(batch(number), seed=number)
    sides.assert_same()


def test_questions_that_an_update_does_not_answer_leave_it_due() -> None:
    """Or every `zero_grad` and `train` of a loop would cost the overlap."""
    sides = due()
    sides.optimizer.zero_grad()
    sides.compiled.train()
    assert sum(p.numel() * p.element_size() for p in sides.compiled.parameters() if p.requires_grad) > 0
    assert all(p.shape for p in sides.streamed.parameters())
    assert sides.step.prepare(batch(2)).kind.updates == "deferred"
    sides.take(batch(2), seed=2)
    assert sides.step.schedule.kind.updates == "deferred"
    sides.assert_same()


def test_an_optimizer_state_that_is_loaded_is_not_updated_from_before() -> None:
    sides = due()
    for optimizer in (sides.eager_optimizer, sides.optimizer):
        optimizer.load_state_dict(sgd(TASK.build()).state_dict())
    assert_same(snapshot(sides.eager, sides.eager_optimizer), snapshot(sides.streamed, sides.optimizer))


def test_the_last_updates_are_not_lost_with_the_step() -> None:
    """A function that trains and returns leaves the model trained, whatever of its objects live on."""
    sides = due()
    model, optimizer = sides.streamed, sides.optimizer
    expected = snapshot(sides.eager, sides.eager_optimizer)
    del sides
    gc.collect()
    assert_same(expected, snapshot(model, optimizer))


def test_two_steps_take_turns_over_one_model() -> None:
    """Two optimizers over disjoint parameters; each step sees what the other updated."""
    for mode, other in itertools.product(("deferred", "overlap", "serial"), repeat=2):
        eager, compiled = TASK.build(), fresh("hazardous")
        models: tuple[Any, Any] = (eager, compiled.megatrain.model)
        halves = [[list(m.layers.parameters()), list(m.head.parameters())] for m in models]
        expected, found = ([torch.optim.SGD(p, lr=0.1, momentum=0.9) for p in half] for half in halves)
        steps = [
            megatrain.TrainStep(compiled, optimizer, loss=TASK.loss, **MODES[m])
            for optimizer, m in zip(found, (mode, other), strict=True)
        ]
        for number in range(6):
            which, norm = number % 2, MODES[(mode, other)[number % 2]].get("max_grad_norm")
            torch.manual_seed(number)
            loss, _ = loop_step(eager, expected[which], batch(number), loss=TASK.loss, max_norm=norm)
            torch.manual_seed(number)
            assert_same(loss, steps[which](batch(number)), (mode, other, number))
        compiled.state_dict()
        assert_same(snapshot(eager, *expected), snapshot(compiled.megatrain.model, *found), (mode, other))


@pytest.mark.parametrize("mode", TELLING_MODES)
def test_backwards_by_hand_between_steps(mode: str) -> None:
    sides = SideBySide.of("hazardous", adamw, **MODES[mode])
    for number in range(4):
        sides.take(batch(number), seed=number)
        for model in (sides.eager, sides.compiled):
            torch.manual_seed(number)
            own_loss(model(batch(number + 10)), square, None).backward()
        expected, found = ({n: p.grad for n, p in m.named_parameters()} for m in (sides.eager, sides.streamed))
        assert_same(expected, found, "gradients")
        if number == 1:
            sides.optimizer.step()  # and even a step by hand
            sides.eager_optimizer.step()
        sides.optimizer.zero_grad()
        sides.eager_optimizer.zero_grad()
    sides.assert_same()


@pytest.mark.parametrize("mode", TELLING_MODES)
def test_a_backward_that_comes_behind_a_step(mode: str) -> None:
    """The parameters it would read are no longer those of its forward, so it is refused, as by autograd."""
    sides = SideBySide.of("hazardous", sgd, **MODES[mode])
    sides.take(batch(0), seed=0)
    loss = sides.compiled(batch(1)).square().mean()
    sides.step(batch(2))
    with pytest.raises(ExecuteError, match="was modified between forward and backward"):
        loss.backward()
    assert all(p.grad is None for p in sides.streamed.parameters())
    sides.step(batch(3))


@pytest.mark.parametrize("mode", TELLING_MODES)
def test_modules_frozen_and_thawed_between_steps(mode: str) -> None:
    sides = SideBySide.of("hazardous", sgd, **MODES[mode])
    for number in range(6):
        for model in (sides.eager, sides.streamed):
            model.layers[0].requires_grad_(not 2 <= number < 4)
        sides.take(batch(number), seed=number)
    sides.assert_same()


@pytest.mark.parametrize("mode", TELLING_MODES)
def test_groups_that_are_added_and_changed_between_steps(mode: str) -> None:
    def of_layers(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.layers.parameters(), lr=1e-2)

    sides = SideBySide.of("hazardous", of_layers, **MODES[mode])
    for number in range(5):
        sides.take(batch(number), seed=number)
        if number == 1:
            sides.eager_optimizer.add_param_group({"params": sides.eager.head.parameters(), "lr": 0.1})
            sides.optimizer.add_param_group({"params": sides.streamed.head.parameters(), "lr": 0.1})
        for optimizer in (sides.eager_optimizer, sides.optimizer):
            optimizer.param_groups[0]["betas"] = (0.5 + 0.1 * number, 0.99)
            optimizer.param_groups[-1]["lr"] *= 0.5
    sides.assert_same()


@pytest.mark.parametrize("mode", TELLING_MODES)
def test_batches_of_other_sizes_in_turns(mode: str) -> None:
    """Updates that are due are taken by a step of another schedule."""
    sides = SideBySide.of("hazardous", sgd, **MODES[mode])
    for number, (size, count) in enumerate(((2, 1), (3, 1), (2, 2), (3, 1), (2, 1))):
        batches = [torch.randn(size, 4, generator=torch.Generator().manual_seed(number + i)) for i in range(count)]
        sides.take(batches, seed=number)
    sides.assert_same()


class Scaled:
    """A loss with a parameter of its own."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.scale = nn.Parameter(torch.tensor(0.5))

    def __call__(self, result: torch.Tensor, batch: Any) -> torch.Tensor:
        return (result * self.scale).square().mean()


@pytest.mark.parametrize("mode", TELLING_MODES)
def test_a_loss_with_a_parameter_of_its_own(mode: str) -> None:
    """It isn't of the model, so it isn't clipped with `model.parameters()`; its updates come with all others."""
    eager, compiled = TASK.build(), fresh("hazardous")
    losses = [Scaled(eager), Scaled(compiled.megatrain.model)]
    expected, found = (torch.optim.SGD([*loss.model.parameters(), loss.scale], lr=0.1, momentum=0.9) for loss in losses)
    step = megatrain.TrainStep(compiled, found, loss=losses[1], **MODES[mode])
    for number in range(4):
        batches = [batch(number), batch(number + 10)]
        torch.manual_seed(number)
        loss, _ = loop_step(eager, expected, batches, loss=losses[0], max_norm=MODES[mode].get("max_grad_norm"))
        torch.manual_seed(number)
        assert_same(loss, step(batches), (mode, number))
    step.flush()
    assert_same(losses[0].scale.detach(), losses[1].scale.detach(), "scale")
    assert_same(snapshot(eager, expected), snapshot(compiled.megatrain.model, found), mode)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_hooks_of_the_optimizers_step_see_and_change_gradients(max_grad_norm: float | None) -> None:
    """They see them clipped, as in the loop; what they put in place of a gradient, or take away, counts."""
    seen: dict[int, list[Any]] = {}

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = optimizer.param_groups[0]["params"]
        seen.setdefault(id(optimizer), []).append([None if p.grad is None else p.grad.clone() for p in parameters])
        parameters[0].grad = parameters[0].grad.sign()
        parameters[1].grad = None
        parameters[2].grad.mul_(0.5)

    sides = SideBySide.of("hazardous", sgd, max_grad_norm=max_grad_norm)
    for optimizer in (sides.eager_optimizer, sides.optimizer):
        optimizer.register_step_pre_hook(hook)
    for number in range(3):
        sides.take(batch(number), seed=number)
    sides.assert_same()
    assert_same(seen[id(sides.eager_optimizer)], seen[id(sides.optimizer)], "seen")
