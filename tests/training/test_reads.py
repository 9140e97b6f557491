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
from tests.training.loops import MODES, TASKS, Pair, adamw, eager_step, fresh, own_loss, sgd, square

TASK = TASKS["hazardous"]
WEIGHT = "layers.0.fc.weight"


def batch(step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def due(optimizer: Any = sgd, **options: Any) -> Pair:
    """Three steps, the updates of the third not taken."""
    pair = Pair.of("hazardous", optimizer, **{"max_grad_norm": 0.5, **options})
    pair.take(batch(0), seed=0)
    alias = pair.stepped.get_parameter(WEIGHT).data  # the same memory; nobody knows who looks at it
    pair.take(batch(1), seed=1)
    pair.take(batch(2), seed=2)
    assert pair.step.schedule.kind.updates == "deferred"
    assert not torch.equal(alias, pair.eager.get_parameter(WEIGHT)), "nothing is due"
    return pair


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
    pair = due()
    assert_same(pair.eager.get_parameter(WEIGHT).detach().clone(), READS[read](pair.compiled).detach().clone(), read)
    assert_same(snapshot(pair.eager, pair.eager_optimizer), snapshot(pair.stepped, pair.optimizer))
    pair.take(batch(2), seed=2)
    pair.assert_same()


def test_an_evaluation_sees_the_updates() -> None:
    pair = due()
    pair.compiled.eval()
    pair.eager.eval()
    with torch.no_grad():
        assert_same(pair.eager(batch(9)), pair.compiled(batch(9)))
    pair.compiled.train()
    pair.eager.train()
    pair.take(batch(2), seed=2)
    pair.take(batch(3), seed=3)
    pair.assert_same()


def test_what_is_loaded_is_not_updated_from_before() -> None:
    pair = due()
    other = {
        name: value + 0.25 if value.is_floating_point() else value for name, value in TASK.build().state_dict().items()
    }
    for model in (pair.eager, pair.compiled):
        model.load_state_dict(copy.deepcopy(other))
    assert_same(snapshot(pair.eager), snapshot(pair.stepped))
    pair.take(batch(2), seed=2)
    pair.assert_same()


def test_a_value_written_in_place_is_not_lost() -> None:
    pair = due()
    with torch.no_grad():
        for model in (pair.eager, pair.compiled):
            model.get_parameter(WEIGHT).mul_(0.5)
    pair.take(batch(2), seed=2)
    pair.assert_same()


def averaged(pair: Pair) -> torch.Tensor:
    copied = torch.optim.swa_utils.AveragedModel(TASK.build())
    copied.update_parameters(pair.stepped)
    return copied.module.get_parameter(WEIGHT)


READS_BESIDE: dict[str, Callable[[Pair, nn.Parameter], torch.Tensor]] = {
    "the model's attribute": lambda pair, _: pair.stepped.layers[0].fc.weight * 1,
    "the model's state dict": lambda pair, _: pair.stepped.state_dict()[WEIGHT],
    "the model itself": lambda pair, _: pair.stepped.layers[0].fc(torch.eye(4)),
    "a copy of the model": lambda pair, _: copy.deepcopy(pair.stepped).get_parameter(WEIGHT),
    "a pickled model": lambda pair, _: pickle.loads(pickle.dumps(pair.stepped)).get_parameter(WEIGHT),
    "a moving average": lambda pair, _: averaged(pair),
    "the optimizer's groups": lambda pair, held: next(
        p for p in pair.optimizer.param_groups[0]["params"] if p is held
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
    pair = due()
    held = pair.stepped.layers[0].fc.weight
    seen = READS_BESIDE[read](pair, held).detach().clone()
    assert_same(snapshot(pair.eager, pair.eager_optimizer), snapshot(pair.stepped, pair.optimizer))
    assert_same(READS_BESIDE[read](pair, held).detach(), seen, read)
    assert type(held) is nn.Parameter
    pair.take(batch(2), seed=2)
    pair.assert_same()


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
    pair = due(lambda model: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    with torch.no_grad():
        for model, optimizer in ((pair.eager, pair.eager_optimizer), (pair.stepped, pair.optimizer)):
            WRITES[write](model, model.layers[0].fc.weight, optimizer)
    for number in (2, 3):
        pair.take(batch(number), seed=number)
    pair.assert_same()


def test_questions_that_an_update_does_not_answer_leave_it_due() -> None:
    """Or every `zero_grad` and `train` of a loop would cost the overlap."""
    pair = due()
    pair.optimizer.zero_grad()
    pair.compiled.train()
    assert sum(p.numel() * p.element_size() for p in pair.compiled.parameters() if p.requires_grad) > 0
    assert all(p.shape for p in pair.stepped.parameters())
    assert pair.step.prepare(batch(2)).kind.updates == "deferred"
    pair.take(batch(2), seed=2)
    assert pair.step.schedule.kind.updates == "deferred"
    pair.assert_same()


def test_an_optimizer_state_that_is_loaded_is_not_updated_from_before() -> None:
    pair = due()
    for optimizer in (pair.eager_optimizer, pair.optimizer):
        optimizer.load_state_dict(sgd(TASK.build()).state_dict())
    assert_same(snapshot(pair.eager, pair.eager_optimizer), snapshot(pair.stepped, pair.optimizer))


def test_the_last_updates_are_not_lost_with_the_step() -> None:
    """A function that trains and returns leaves the model trained, whatever of its objects live on."""
    pair = due()
    model, optimizer = pair.stepped, pair.optimizer
    expected = snapshot(pair.eager, pair.eager_optimizer)
    del pair
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
            loss, _ = eager_step(eager, expected[which], batch(number), loss=TASK.loss, max_norm=norm)
            torch.manual_seed(number)
            assert_same(loss, steps[which](batch(number)), (mode, other, number))
        compiled.state_dict()
        assert_same(snapshot(eager, *expected), snapshot(compiled.megatrain.model, *found), (mode, other))


@pytest.mark.parametrize("mode", MODES)
def test_backwards_by_hand_between_steps(mode: str) -> None:
    pair = Pair.of("hazardous", adamw, **MODES[mode])
    for number in range(4):
        pair.take(batch(number), seed=number)
        for model in (pair.eager, pair.compiled):
            torch.manual_seed(number)
            own_loss(model(batch(number + 10)), square, None).backward()
        expected, found = ({n: p.grad for n, p in m.named_parameters()} for m in (pair.eager, pair.stepped))
        assert_same(expected, found, "gradients")
        if number == 1:
            pair.optimizer.step()  # and even a step by hand
            pair.eager_optimizer.step()
        pair.optimizer.zero_grad()
        pair.eager_optimizer.zero_grad()
    pair.assert_same()


@pytest.mark.parametrize("mode", MODES)
def test_a_backward_that_comes_behind_a_step(mode: str) -> None:
    """The parameters it would read are no longer those of its forward, so it is refused, as by autograd."""
    pair = Pair.of("hazardous", sgd, **MODES[mode])
    pair.take(batch(0), seed=0)
    loss = pair.compiled(batch(1)).square().mean()
    pair.step(batch(2))
    with pytest.raises(ExecuteError, match="was modified between forward and backward"):
        loss.backward()
    assert all(p.grad is None for p in pair.stepped.parameters())
    pair.step(batch(3))


@pytest.mark.parametrize("mode", MODES)
def test_modules_frozen_and_thawed_between_steps(mode: str) -> None:
    pair = Pair.of("hazardous", sgd, **MODES[mode])
    for number in range(6):
        for model in (pair.eager, pair.stepped):
            model.layers[0].requires_grad_(not 2 <= number < 4)
        pair.take(batch(number), seed=number)
    pair.assert_same()


@pytest.mark.parametrize("mode", MODES)
def test_groups_that_are_added_and_changed_between_steps(mode: str) -> None:
    def of_layers(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.layers.parameters(), lr=1e-2)

    pair = Pair.of("hazardous", of_layers, **MODES[mode])
    for number in range(5):
        pair.take(batch(number), seed=number)
        if number == 1:
            pair.eager_optimizer.add_param_group({"params": pair.eager.head.parameters(), "lr": 0.1})
            pair.optimizer.add_param_group({"params": pair.stepped.head.parameters(), "lr": 0.1})
        for optimizer in (pair.eager_optimizer, pair.optimizer):
            optimizer.param_groups[0]["betas"] = (0.5 + 0.1 * number, 0.99)
            optimizer.param_groups[-1]["lr"] *= 0.5
    pair.assert_same()


@pytest.mark.parametrize("mode", MODES)
def test_batches_of_other_sizes_in_turns(mode: str) -> None:
    """Updates that are due are taken by a step of another schedule."""
    pair = Pair.of("hazardous", sgd, **MODES[mode])
    for number, (size, count) in enumerate(((2, 1), (3, 1), (2, 2), (3, 1), (2, 1))):
        batches = [torch.randn(size, 4, generator=torch.Generator().manual_seed(number + i)) for i in range(count)]
        pair.take(batches, seed=number)
    pair.assert_same()


class Scaled:
    """A loss with a parameter of its own."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.scale = nn.Parameter(torch.tensor(0.5))

    def __call__(self, result: torch.Tensor, batch: Any) -> torch.Tensor:
        return (result * self.scale).square().mean()


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_with_a_parameter_of_its_own(mode: str) -> None:
    """It isn't of the model, so it isn't clipped with `model.parameters()`; its updates come with all others."""
    eager, compiled = TASK.build(), fresh("hazardous")
    losses = [Scaled(eager), Scaled(compiled.megatrain.model)]
    expected, found = (torch.optim.SGD([*loss.model.parameters(), loss.scale], lr=0.1, momentum=0.9) for loss in losses)
    step = megatrain.TrainStep(compiled, found, loss=losses[1], **MODES[mode])
    for number in range(4):
        batches = [batch(number), batch(number + 10)]
        torch.manual_seed(number)
        loss, _ = eager_step(eager, expected, batches, loss=losses[0], max_norm=MODES[mode].get("max_grad_norm"))
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

    pair = Pair.of("hazardous", sgd, max_grad_norm=max_grad_norm)
    for optimizer in (pair.eager_optimizer, pair.optimizer):
        optimizer.register_step_pre_hook(hook)
    for number in range(3):
        pair.take(batch(number), seed=number)
    pair.assert_same()
    assert_same(seen[id(pair.eager_optimizer)], seen[id(pair.optimizer)], "seen")
