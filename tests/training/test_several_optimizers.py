"""Several optimizers take one step: the bits are those of their steps one after the other, in every mode."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import OptimizerError, OptionError
from megatrain.optim.per_parameter import register
from tests.comparing import assert_same, snapshot
from tests.training.hazards import TRAP
from tests.training.parity import MODES, TASKS, TELLING_MODES, SideBySide, fresh, loop_step
from tests.training.test_failures import batches

STEPS = 4
Optimizers = list[torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def _clear_trap() -> Generator[None]:
    TRAP.clear()
    yield
    TRAP.clear()


def split(parameters: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Matrices, and all others."""
    trained = [p for p in parameters if p.requires_grad]
    return [p for p in trained if p.dim() == 2], [p for p in trained if p.dim() != 2]


def muon_adamw(parameters: Sequence[Any]) -> Optimizers:
    matrices, others = split(parameters)
    return [torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.1), torch.optim.AdamW(others, lr=1e-2)]


def sgd_adafactor(parameters: Sequence[Any]) -> Optimizers:
    matrices, others = split(parameters)
    groups = [{"params": matrices[:2]}, {"params": matrices[2:], "lr": 3e-3}]
    return [torch.optim.SGD(others, lr=1e-2, momentum=0.9), torch.optim.Adafactor(groups, lr=1e-2)]


def over(make: Callable[[Sequence[Any]], Optimizers]) -> Callable[[nn.Module], Optimizers]:
    return lambda model: make(list(model.parameters()))


def schedulers(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """Another one for each."""
    kinds = torch.optim.lr_scheduler
    return [kinds.LambdaLR(optimizers[0], lambda step: 1 / (step + 1)), kinds.CosineAnnealingLR(optimizers[1], STEPS)]


# -- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pair", "mode"),
    [("gpt", muon_adamw, "deferred"), ("llama", sgd_adafactor, "spread"), ("cnn", muon_adamw, "serial")],
)
def test_steps_have_the_bits_of_the_loop(name: str, pair: Any, mode: str) -> None:
    """With a scheduler for each optimizer, and one micro-batch or two in turns.

    The GPT's embedding is its head too: blocks that share a parameter add micro-batches in another order.
    """
    task, options = TASKS[name], MODES[mode]
    transfer, clip = "bind" if name == "cnn" else "copy", options.get("max_grad_norm")
    sides = SideBySide.of(name, over(pair), compile_options={"transfer": transfer}, **options)
    both = [*schedulers(sides.eager_optimizers), *schedulers(sides.optimizers)]
    for number in range(STEPS):
        batches = [task.batch(number + 20 * i, 2) for i in range(1 if name == "gpt" else 1 + number % 2)]
        torch.manual_seed(number)
        expected = loop_step(sides.eager, sides.eager_optimizers, batches, loss=sides.loss, max_norm=clip)
        torch.manual_seed(number)
        assert_same(expected, (sides.step(batches), sides.step.progress.grad_norm), "the norm is that of all gradients")
        for scheduler in both:
            scheduler.step()
        assert sides.step._setup.is_due == (mode in ("deferred", "spread"))
    sides.assert_same()
    assert sides.step.schedule.kind.updates == mode
    assert all(p.grad is None for p in sides.streamed.parameters())


class Scaled:
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        self.scale = nn.Parameter(torch.tensor(0.5))

    def __call__(self, result: torch.Tensor, batch: Any) -> torch.Tensor:
        return (result * self.scale).square().mean()


@pytest.mark.parametrize("mode", TELLING_MODES)
def test_an_optimizer_may_hold_only_a_parameter_outside_the_model(mode: str) -> None:
    eager, compiled = TASKS["hazardous"].build(), fresh("hazardous")
    models, losses = (eager, compiled.megatrain.model), (Scaled(), Scaled())
    expected, found = (
        [torch.optim.SGD([loss.scale], lr=0.1, momentum=0.9), torch.optim.AdamW(model.parameters(), lr=1e-2)]
        for model, loss in zip(models, losses, strict=True)
    )
    step = megatrain.TrainStep(compiled, found, loss=losses[1], **MODES[mode])
    for number in range(4):
        torch.manual_seed(number)
        loss, _ = loop_step(eager, expected, batches(number), loss=losses[0], max_norm=MODES[mode].get("max_grad_norm"))
        torch.manual_seed(number)
        assert_same(loss, step(batches(number)), number)
    step.flush()
    assert_same(losses[0].scale.detach(), losses[1].scale.detach(), "scale")
    assert_same(snapshot(eager, *expected), snapshot(models[1], *found))


# -- failures --------------------------------------------------------------------------------------------------------


@register
class First(torch.optim.SGD):
    """Momentum, and the trap after each update of a block, when parameters and state are written."""

    def step(self, closure: Any = None) -> Any:
        return trapped(self, super().step(closure))


@register
class Second(torch.optim.AdamW):
    """Likewise, with moments."""

    def step(self, closure: Any = None) -> Any:
        return trapped(self, super().step(closure))


def trapped(optimizer: torch.optim.Optimizer, found: Any) -> Any:
    if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        TRAP.at(type(optimizer).__name__)
    return found


def hazards(parameters: Sequence[Any]) -> Optimizers:
    matrices, others = split(parameters)
    return [First(matrices, lr=0.1, momentum=0.9), Second(others, lr=1e-2, amsgrad=True)]


# -- refusals --------------------------------------------------------------------------------------------------------


def test_lists_that_are_no_several_optimizers_are_refused() -> None:
    compiled = fresh("hazardous")
    one = torch.optim.SGD(compiled.parameters(), lr=0.1)
    given: Any
    for given, text in (
        ([], r"^optimizer=\[\] is empty\."),
        ((), r"^optimizer=\(\) is empty\."),
        ([one, one], r"has one optimizer twice: as item 1, and before\."),
        ([one, "AdamW"], r"has item 1, 'AdamW', which is a str\."),
        ({one}, r"^optimizer=<set> is a set\."),
    ):
        for call in (
            lambda given=given: megatrain.TrainStep(compiled, given),
            lambda given=given: megatrain.TrainStep.load("nowhere", compiled, given),
        ):
            with pytest.raises(OptionError, match=text) as caught:
                call()
            assert "optimizer is an optimizer of torch, or a list of different ones." in str(caught.value)
        if isinstance(given, list | tuple):
            with pytest.raises(OptionError, match=text):
                megatrain.plan(TASKS["hazardous"].build(), batches(0)[0], optimizer=given)


def test_a_parameter_that_two_optimizers_hold_is_named() -> None:
    compiled = fresh("hazardous")
    matrices, others = split(list(compiled.parameters()))
    first = torch.optim.SGD(others, lr=0.1)
    with pytest.raises(
        OptimizerError,
        match=r"^two optimizers, SGD and AdamW, hold the parameter `layers.0.fc.bias`\.\n.* once.*\n  Make",
    ):
        megatrain.TrainStep(compiled, [first, torch.optim.AdamW([*matrices, others[0]])])
    step = megatrain.TrainStep(compiled, [first, torch.optim.AdamW(matrices)], loss=lambda result, _: result.sum())
    step(batches(0))
    before = snapshot(compiled.megatrain.model)
    first.add_param_group({"params": matrices[-1:]})
    with pytest.raises(OptimizerError, match=r"hold the parameter `head.weight`"):
        step(batches(1))
    assert_same(before["parameters"], snapshot(compiled.megatrain.model)["parameters"])
    own = nn.Parameter(torch.ones(3))
    with pytest.raises(OptimizerError, match=r"hold the parameter \(3,\)"):
        megatrain.TrainStep(compiled, [torch.optim.SGD([*others, own]), torch.optim.SGD([*matrices, own])])
