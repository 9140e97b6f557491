"""Optimizers whose code nobody knows leave the bits of the plain loop: drawn ones, which couple parameters in many ways.

An optimizer multiplies each update by factors, each under a condition. What a factor knows of other parameters passes
through tensors, options, attributes, closures, globals, lists and generators.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.tiers import one_in
from tests.training.hazards import WIDTH
from tests.training.parity import MODES, SideBySide, generator_of

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
            "state": lambda: self.state.get("all", 0),
        }[place]()
        group["count"] = self.count = GLOBALS[id(self.side)] = count + 1
        self.state["all"] = count + 1
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
