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
from tests.parametrized import KINDS, OPAQUE, WIDTH, Branching, Model, model_of
from tests.tracer.parity import assert_same_step, eager_step, graph_step

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
