"""A small model, and an optimizer, in which a test can make something happen in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatrain.optim.per_parameter import register

WIDTH = 4


class Trap:
    """Runs a function at one place: the `after`-th time that somebody comes by, and from then on if `always`."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.place: object = None
        self.left = 0
        self.always = False
        self.act: Callable[[], object] = lambda: None

    def arm(self, place: object, act: Callable[[], object], *, after: int = 0, always: bool = False) -> None:
        self.place, self.left, self.always, self.act = place, after, always, act

    def at(self, place: object) -> None:
        if place != self.place:
            return
        self.left -= 1
        if self.left == -1 or (self.always and self.left < 0):
            self.act()


TRAP = Trap()
# A capture compares what the code of a model names; a table of this size counts as data, so traps may change in it.
TABLE: dict[Any, Any] = dict.fromkeys(range(1000)) | {"trap": TRAP.at}


class Hazard(torch.autograd.Function):
    """Leaves its input as it is, and comes by the trap at `("forward", number)` and `("backward", number)`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        ctx.number = number
        TABLE["trap"](("forward", number))
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        TABLE["trap"](("backward", ctx.number))
        return gradient * 1.0, None


class Layer(nn.Module):
    """A weight, statistics that each micro-batch changes, and random numbers."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(torch.tanh(self.norm(self.fc(x))), 0.2, self.training)
        return x + Hazard.apply(y, self.number)


class Hazardous(nn.Module):
    def __init__(self, depth: int = 3):
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in range(depth))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Bridged(Hazardous):
    """Every layer but the first reads the first one's output too: its gradient is a sum over blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.layers[0](x)
        for layer in list(self.layers)[1:]:
            x = layer(x) + first
        return self.head(x)


def hazardous(cls: type[Hazardous] = Hazardous) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        return cls()


def bridged() -> nn.Module:
    return hazardous(Bridged)


@register
class Watched(torch.optim.SGD):
    """Momentum, and the trap at `"update"` behind each update, when parameters and state are written."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        if any(p.grad is not None for group in self.param_groups for p in group["params"]):
            TRAP.at("update")
        return found


def watched(model: nn.Module) -> torch.optim.Optimizer:
    return Watched(model.parameters(), lr=0.1, momentum=0.9)
