"""Models whose forward parametrizes a module below and undoes it, as adapters of stacked experts do."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

WIDTH, INNER, NUM = 6, 8, 3


class Experts(nn.Module):
    """Stacked weights, and a buffer."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(NUM, WIDTH, INNER) / WIDTH**0.5, requires_grad=False)
        self.down = nn.Parameter(torch.randn(NUM, INNER, WIDTH) / INNER**0.5, requires_grad=False)
        self.register_buffer("shift", torch.randn(NUM, 1, WIDTH))

    def forward(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        inner = torch.einsum("bw,ewf->ebf", x, self.up).relu() + self.up.mean((1, 2), keepdim=True)
        return torch.einsum("ebw,be->bw", torch.bmm(inner, self.down) + self.shift, gates)


class Drawing(Experts):
    """No graph can repeat its forward."""

    def forward(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return super().forward(x, gates) * random.random()


class Plus(nn.Module):
    """Holds a tensor that was computed in the forward, in an attribute."""

    def __init__(self, delta: torch.Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.delta


class Times(nn.Module):
    """Holds nothing but a parameter of its own."""

    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.scale


class Adapted(nn.Module):
    """Wraps experts, or another wrapper of these, and parametrizes one of their tensors in each forward."""

    def __init__(self, base: nn.Module, name: str, *, is_scaled: bool = False, is_cached: bool = True) -> None:
        super().__init__()
        self.base = base
        self.name, self.is_scaled, self.is_cached, self.is_on = name, is_scaled, is_cached, True
        num, first, second = getattr(self.experts, name).shape
        self.a = nn.Parameter(0.1 * torch.randn(num, first, 2))
        self.b = nn.Parameter(0.1 * torch.randn(num, 2, second))
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(num, 1, 1))

    @property
    def experts(self) -> Any:
        found: Any = self.base
        while isinstance(found, Adapted):
            found = found.base
        return found

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        if not self.is_on:
            return self.base(*args)
        experts = self.experts
        is_first = not parametrize.is_parametrized(experts, self.name)
        needs_grad = getattr(experts, self.name).requires_grad
        more = Times(self.scale) if self.is_scaled else Plus(self.a @ self.b * self.scale)
        parametrize.register_parametrization(experts, self.name, more)
        if is_first:
            experts.parametrizations[self.name].original.requires_grad_(needs_grad)
        try:
            if not self.is_cached:
                return self.base(*args)
            with parametrize.cached():
                return self.base(*args)
        finally:
            found = experts.parametrizations[self.name]
            if len(found) == 1:
                parametrize.remove_parametrizations(experts, self.name, leave_parametrized=False)
            else:
                del found[-1]


class Layer(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.norm, self.gate, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM), experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x)
        return x + self.experts(tokens, self.gate(tokens).softmax(-1))


class Model(nn.Module):
    def __init__(self, adapt: Callable[[], nn.Module], depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(adapt()) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


class Branching(Model):
    """Reads a value of a weight: captured on the values of all weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if self.head.weight.sum() < 1000 else 3)


def trained() -> Experts:
    experts = Experts()
    experts.requires_grad_()
    return experts


KINDS: dict[str, Callable[[], nn.Module]] = {
    "one": lambda: Adapted(Experts(), "up"),
    "two": lambda: Adapted(Adapted(Experts(), "up"), "down"),
    "one twice": lambda: Adapted(Adapted(Experts(), "down", is_scaled=True), "down"),
    "a buffer": lambda: Adapted(Experts(), "shift"),
    "its own parameter": lambda: Adapted(Experts(), "up", is_scaled=True),
    "read anew": lambda: Adapted(Adapted(Experts(), "up", is_cached=False), "down", is_cached=False),
    "trained": lambda: Adapted(Adapted(trained(), "up"), "down"),
}
OPAQUE: dict[str, Callable[[], nn.Module]] = {
    "one": lambda: Adapted(Drawing(), "up"),
    "two": lambda: Adapted(Adapted(Drawing(), "up"), "down"),
    "its own parameter": lambda: Adapted(Drawing(), "up", is_scaled=True),
}


def model_of(adapt: Callable[[], nn.Module], kind: type[Model] = Model) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(adapt)
