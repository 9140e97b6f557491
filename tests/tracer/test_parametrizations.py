"""A parametrization that a forward registers and removes: what it makes of weights is in the graph, state keeps its
names, and what it leaves behind is refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import megatrain
from megatrain.errors import TraceError
from megatrain.tracer.trace import trace
from tests.comparing import assert_same
from tests.tracer.parity import assert_same_step, eager_step, graph_step

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


X = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))


def made(model: nn.Module) -> dict[str, Any]:
    """Classes, and what modules hold, by identity."""
    return {
        name: (type(module), {k: [*v.items()] if isinstance(v, dict) else v for k, v in vars(module).items()})
        for name, module in model.named_modules()
    }


def identities(description: Any) -> Any:
    if isinstance(description, dict):
        return {key: identities(value) for key, value in description.items()}
    if isinstance(description, list | tuple):
        return [identities(value) for value in description]
    return id(description)


@pytest.mark.parametrize("kind", KINDS)
def test_a_capture_equals_eager_and_leaves_the_model_as_it_was(kind: str):
    model, eager = model_of(KINDS[kind]), model_of(KINDS[kind])
    before = identities(made(model))
    traced = trace(model, (X,))
    assert identities(made(model)) == before
    assert not any("opaque" in str(node.target) or node.target == "requires_grad_" for node in traced.graph.nodes)
    assert set(traced.state) <= set(model.state_dict())
    assert_same_step(graph_step(traced, model, (X,), {}), eager_step(eager, (X,), {}))


@pytest.mark.parametrize(("kind", "model_kind"), list(zip(list(OPAQUE)[:2], [Model, Branching], strict=True)))
def test_code_that_no_graph_can_repeat_runs_again_with_what_parametrizes_around_it(kind: str, model_kind: Any):
    model = model_of(OPAQUE[kind], model_kind)
    streamed, eager = copy.deepcopy(model), copy.deepcopy(model)
    compiled = megatrain.compile(streamed, device="cpu", transfer="copy")
    for number in range(3):
        for call in (eager, compiled):
            random.seed(number)
            call(X + number).backward()
        gradients = [{n: p.grad for n, p in m.named_parameters()} for m in (eager, streamed)]
        assert_same(gradients[0], gradients[1], f"gradients {number}")
        with torch.no_grad():
            for parameter in (*eager.parameters(), *streamed.parameters()):
                parameter.mul_(1.1)
                parameter.grad = None
    names = [call.name for call in compiled.program.opaque_calls]
    assert names == [f"layers.{i}.experts" for i in range(3)]
    assert len(compiled.program.blocks) >= 3


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Inverted(Doubled):
    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def _leaves(model: Any, x: torch.Tensor) -> torch.Tensor:
    if not parametrize.is_parametrized(model.fc):
        parametrize.register_parametrization(model.fc, "weight", Doubled())
    return model.fc(x)


def _drops(model: Any, x: torch.Tensor) -> torch.Tensor:
    if hasattr(model, "once"):
        x = x + model.once
        del model.once
    return model.fc(x)


def _moves_values(model: Any, x: torch.Tensor) -> torch.Tensor:
    parametrize.register_parametrization(model.fc, "weight", Inverted())
    y = model.fc(x)
    parametrize.remove_parametrizations(model.fc, "weight")
    return y


def _bakes_in(model: Any, x: torch.Tensor) -> torch.Tensor:
    parametrize.register_parametrization(model.fc, "weight", Doubled())
    y = model.fc(x)
    parametrize.remove_parametrizations(model.fc, "weight", leave_parametrized=True)
    return y


def _trains(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.frozen.requires_grad_()
    return model.fc(x) + model.frozen


class Host(nn.Module):
    def __init__(self, body: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body, self.fc = body, nn.Linear(WIDTH, WIDTH)
        self.once = nn.Parameter(torch.ones(WIDTH))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


# New memory may lie where the old memory was, which has just been given back: then the new values are noticed.
_MOVED = (
    "gives a parameter other memory in the forward of the model|writes into its parameter `fc.weight` during forward"
)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (_leaves, "after the forward, `fc` is of class ParametrizedLinear"),
        (_drops, "after the forward, `once` is not a parameter of its module"),
        (_moves_values, _MOVED),
        (_bakes_in, _MOVED),
        (_trains, "changes whether a parameter requires a gradient at test_parametrizations.py"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_a_forward_that_leaves_modules_otherwise_is_refused_and_the_model_is_as_it_was(body: Any, expected: str):
    model = Host(body)
    before = identities(made(model))
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(TraceError, match=expected):
        trace(model, (X,))
    assert identities(made(model)) == before
    assert_same(values, dict(model.state_dict()))


class Other(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def test_another_class_of_a_module_is_another_capture():
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    compiled = megatrain.compile(model, device="cpu")
    compiled(X)
    compiled(X)  # compares what the capture assumed for the first time
    model[0].__class__ = Other
    assert_same(model(X), compiled(X))
    assert compiled.recompiled_because == ("model.0 is of class Other now, not Linear",)
