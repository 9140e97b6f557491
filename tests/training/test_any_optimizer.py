"""Optimizers whose code nobody knows leave the bits of the plain loop: drawn ones, which couple parameters.

An optimizer multiplies each update by factors, each under a condition. What a factor knows of other parameters passes
through tensors, options, attributes, closures, globals, lists and generators.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import OptimizerError
from megatrain.optim.per_parameter import register, unregister
from tests.comparing import assert_same, snapshot
from tests.optim.reference import Reference, assert_same_training
from tests.tiers import one_in
from tests.training.hazards import WIDTH
from tests.training.parity import MODES, TASKS, SideBySide, generator_of, square

GLOBALS: dict[int, int] = {}
STEPS = 7
Factor = Callable[["Drawn", dict[str, Any], int, Any], Any]


def counted(place: str) -> Factor:
    """Counts parameters, in one of the places where Python keeps numbers."""

    def factor(self: Drawn, group: dict[str, Any], index: int, p: Any) -> float:
        count = {
            "option": lambda: group["count"],
            "attribute": lambda: self.count,
            "closure": self.next_of_closure,
            "global": lambda: GLOBALS.setdefault(id(self.side), 0),
            "state": lambda: self.shared.get("all", 0),
        }[place]()
        group["count"] = self.count = GLOBALS[id(self.side)] = count + 1
        self.shared["all"] = count + 1
        return 1 / (1 + count % 7)

    return factor


def switched(self: Drawn, group: dict[str, Any], index: int, p: Any) -> float:
    if p.ndim == 1 and self.state[p]["step"] >= 3:
        group["phase"] = 1
    return 0.5 if group["phase"] else 1.0


def clipped(threshold: float, *, in_python: bool) -> Factor:
    def factor(self: Drawn, group: dict[str, Any], index: int, p: Any) -> Any:
        norm = nn.utils.get_total_norm(self.gradients())
        return min(1.0, threshold / float(norm)) if in_python else (threshold / norm).clamp(max=1)

    return factor


def by_earlier(self: Drawn, group: dict[str, Any], index: int, p: Any) -> Any:
    """The gradient that came before, and the first of the step before."""
    factor = 1 + self.kept[-1].mean().abs() + self.kept[0].mean().abs() if self.kept else 1
    self.kept = [*self.kept[-9:], p.grad]
    return factor


FACTORS: dict[str, Factor] = {
    **{f"count in {place}": counted(place) for place in ("option", "attribute", "closure", "global", "state")},
    **{f"norm over {at}": clipped(at, in_python=at > 0.02) for at in (0.001, 0.02, 0.03, 30.0)},
    "own norm": lambda self, group, index, p: 1 / (1 + p.grad.norm()),
    "switched": switched,
    "earlier gradients": by_earlier,
    "how many": lambda self, group, index, p: 1 / len(group["params"]),
    "place": lambda self, group, index, p: 1 / (1 + index),
    "neighbour": lambda self, group, index, p: 1 + group["params"][index - 1].mean(),
    "stacked": lambda self, group, index, p: torch.stack([g.norm() for g in self.gradients()]).softmax(0)[0],
    "foreach": lambda self, group, index, p: 1 + sum(torch._foreach_norm(self.gradients())),
    "noise": lambda self, group, index, p: torch.rand(()),
    "rate of another group": lambda self, group, index, p: self.param_groups[-1]["lr"] * 10,
}
CONDITIONS: dict[str, Callable[[Drawn, Any], bool]] = {
    "always": lambda self, p: True,
    "matrices": lambda self, p: p.ndim == 2,
    "from step four": lambda self, p: self.state[p]["step"] > 3,
    "odd steps": lambda self, p: self.state[p]["step"] % 2 == 1,
    "large gradients": lambda self, p: float(nn.utils.get_total_norm(self.gradients())) > 0.02,
}


class Drawn(torch.optim.Optimizer):
    """Momentum, times factors."""

    def __init__(self, groups: Any, rules: list[tuple[str, str]]):
        super().__init__(groups, {"lr": 0.1, "phase": 0, "count": 0})
        self.rules, self.side, self.count, self.kept = rules, object(), 0, []
        self.shared: Any = self.state  # torch types its keys as tensors
        count = -1

        def next_of_closure() -> int:
            nonlocal count
            count += 1
            return count

        self.next_of_closure = next_of_closure

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                update = group["lr"] * mean
                for condition, factor in self.rules:
                    if CONDITIONS[condition](self, p):
                        update = update * FACTORS[factor](self, group, index, p)
                p.sub_(update)


def drawn(seed: int) -> Callable[[nn.Module], Any]:
    draw = random.Random(seed)
    rules = [(draw.choice([*CONDITIONS]), draw.choice([*FACTORS])) for _ in range(draw.choice((1, 1, 2, 3)))]
    shape = draw.choice(("one group", "two groups", "two optimizers", "after torch's", "before torch's"))

    def make(model: nn.Module) -> Any:
        parameters = list(model.parameters())
        some, others = parameters[::2], parameters[1::2]
        if shape == "one group":
            return Drawn(parameters, rules)
        if shape == "two groups":
            return Drawn([{"params": some}, {"params": others, "lr": 0.05}], rules)
        if shape == "two optimizers":
            return [Drawn(some, rules), Drawn(others, rules[::-1])]
        torchs = torch.optim.SGD(others, lr=0.1)
        return [torchs, Drawn(some, rules)] if shape == "after torch's" else [Drawn(some, rules), torchs]

    return make


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("seed", one_in(25, range(400)))
def test_a_drawn_optimizer_has_the_bits_of_the_loop(seed: int) -> None:
    GLOBALS.clear()
    draw = random.Random(seed)
    task, width = draw.choice((("stack", 3), ("hazardous", WIDTH), ("bridged", WIDTH)))
    sides = SideBySide.of(task, drawn(seed), **MODES[draw.choice([*MODES])])
    both = [*sides.eager_optimizers, *sides.optimizers]
    rates = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step)) for each in both]
    micro_batches, is_scheduled = draw.choice((1, 2)), draw.random() < 0.5
    for number in range(STEPS):
        batches = [torch.randn(2 + i, width, generator=generator_of(2 * number + i)) for i in range(micro_batches)]
        sides.take(batches, seed=number)
        for rate in rates if is_scheduled else ():
            rate.step()
        for each in both if number == 4 else ():
            each.param_groups[0]["lr"] *= 0.5
    sides.assert_same()


# -- single cases ----------------------------------------------------------------------------------------------------


class Moody(torch.optim.SGD):
    """Steps in its mode for training only, as optimizers that average weights do."""

    def __init__(self, params: Any):
        super().__init__(params, 0.1)
        self.train(mode=False)

    def train(self, mode: bool = True) -> None:
        for group in self.param_groups:
            group["train_mode"] = mode

    def step(self, closure: Any = None) -> Any:
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("call train() first")
        return super().step(closure)


def test_a_step_may_be_made_while_the_optimizer_is_in_another_mode(promise: Callable[[type], None]) -> None:
    for is_promised in (False, True):
        if is_promised:
            promise(Moody)
        sides = SideBySide.of("stack", lambda model: Moody(model.parameters()))
        before = snapshot(sides.streamed, sides.optimizer)
        with pytest.raises((RuntimeError, OptimizerError), match=r"call train\(\) first"):
            sides.step(torch.ones(2, 3))
        assert_same(before, snapshot(sides.streamed, sides.optimizer))
        for optimizer in (sides.eager_optimizer, sides.optimizer):
            optimizer.train()  # pyright: ignore[reportAttributeAccessIssue]
        sides.take(torch.ones(2, 3), seed=0)
        sides.assert_same()


@pytest.fixture
def promise() -> Generator[Callable[[type[torch.optim.Optimizer]], object]]:
    """Registers classes, for the time of a test."""
    kinds: list[type[torch.optim.Optimizer]] = []
    yield lambda kind: kinds.append(register(kind))
    for kind in kinds:
        unregister(kind)


class Failing(torch.optim.AdamW):
    """Divides by a norm of all gradients, and fails when everything is written."""

    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm = nn.utils.get_total_norm([p.grad for group in self.param_groups for p in group["params"]])
        self.param_groups[0]["lr"] = 0.1 / (1 + float(norm))
        self.taken = getattr(self, "taken", 0) + 1
        super().step()
        if Failing.fails:
            raise KeyError("my own error")


@pytest.mark.parametrize("mode", ["overlap", "deferred"])
def test_a_step_at_once_that_fails_leaves_no_trace(mode: str) -> None:
    sides = SideBySide.of("hazardous", lambda model: Failing(model.parameters()), **MODES[mode])
    for number in range(4):
        batch = [torch.randn(3, WIDTH, generator=generator_of(number + i)) for i in range(2)]
        if number in (0, 2):
            torch.manual_seed(number)
            sides.step.flush()
            before = snapshot(sides.streamed, sides.optimizer)
            Failing.fails = True
            with pytest.raises(KeyError, match="my own error"):
                sides.step(batch)
            Failing.fails = False
            assert_same(before, snapshot(sides.streamed, sides.optimizer))
        sides.take(batch, seed=number)
        assert sides.step.schedule.kind.updates == "serial"
    sides.assert_same()


class Together(torch.optim.SGD):
    """Adds a mean of all moments to all parameters, with and without a gradient; keeps gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        kept = getattr(self, "kept", [])
        mean = sum(g.mean() for g in kept)
        self.kept = [p.grad for p in parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(self.kept)
        for p in parameters:
            p.mul_(0.99).add_(mean)
            if p.grad is not None:
                self.state[p]["mean"] = self.state[p].get("mean", torch.zeros_like(p)).lerp(p.grad, 0.5)
                p.sub_(self.state[p]["mean"], alpha=0.1 / (1 + float(norm)))


def test_over_masters_it_sees_fp32_parameters_and_gradients() -> None:
    """Those of a reference that is written with nothing of megatrain."""
    model = TASKS["stack"].build()
    reference = Reference(model, Together)
    compiled = megatrain.compile(model, device="cpu", transfer="copy", precision="bf16")
    optimizer = Together(list(compiled.parameters()))
    step = megatrain.TrainStep(compiled, optimizer, loss=lambda result, batch: result.float().square().mean())
    for number in range(4):
        batch = torch.randn(4, 3, generator=generator_of(number))
        expected = reference.step((batch,), {})
        assert float(step(batch)) == expected
    loop = SimpleNamespace(compiled=compiled, model=compiled.megatrain.model, optimizer=optimizer)
    assert_same_training(reference, loop)  # pyright: ignore[reportArgumentType]


def test_a_plan_counts_all_gradients_and_copies_and_names_the_promise(promise: Callable[[type], None]) -> None:
    model = TASKS["stack"].build()
    gradients = sum(p.nbytes for p in model.parameters())
    planned = partial(megatrain.plan, model, torch.ones(2, 3), optimizer=Together, loss=square, max_grad_norm=1.0)
    found = planned()
    assert found.schedule.kind.updates == "serial"
    assert found.host.is_estimate
    assert found.host.bytes_of("Together.state") == 2 * gradients
    assert found.host.bytes_of("update scratch") >= 4 * gradients
    assert "megatrain.optim.per_parameter.register(Together)" in found.host.helps[0]
    promise(Together)
    assert planned().schedule.kind.updates == "deferred"
    assert not planned().host.is_estimate
