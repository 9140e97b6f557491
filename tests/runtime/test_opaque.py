"""Code that no single graph can stand for trains as in eager: checks in mid-step, and modules that run again."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import megatrain
from tests.comparing import assert_same_state
from tests.runtime.parity import Trained, train
from tests.tiers import diagonal
from tests.tracer import test_refusals as bodies

# Some of these models are opaque as a whole.
pytestmark = pytest.mark.filterwarnings("ignore:the whole model is one opaque block")

CHECKED = (
    bodies.branches_on_weights,
    bodies.takes_an_item,
    bodies.lists_values,
    bodies.reads_numpy,
    bodies.formats_a_value,
    bodies.reads_a_random_number,
    bodies.selects_by_weights,
)
RUN_AGAIN = (
    bodies.calls_torchscript,
    bodies.draws_from_python,
    bodies.draws_from_numpy,
    bodies.seeds_the_generator,
    bodies.counts_calls,
    bodies.counts_in_a_dict,
    bodies.carries_a_tensor,
    bodies.carries_an_input,
    bodies.assigns_data,
    bodies.assigns_requires_grad,
    bodies.hooks_a_tensor,
    bodies.keeps_a_gradient,
    bodies.maps_over_a_batch,
    bodies.hides_weights_in_a_closure,
)


def _trained(body: Callable[..., Any], **options: Any) -> tuple[Trained, Any, Any]:
    """Trains for three steps, so that values change; returns also the generators' states and the compiled model."""
    torch.manual_seed(0)
    random.seed(1)
    np.random.seed(1)
    model = bodies.Host(body)
    x = torch.randn(4, 3)
    call = megatrain.compile(model, **options) if options else model
    found = train(call, model, (x,), {}, steps=3)
    return found, (random.getstate(), str(np.random.get_state())), call


@pytest.mark.parametrize(
    ("body", "activations"),
    diagonal([*CHECKED, *RUN_AGAIN], ["recompute", "keep"]),
    ids=lambda each: getattr(each, "__name__", None),
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_three_steps_equal_eager(body: Callable[..., Any], activations: str) -> None:
    eager, host, _ = _trained(body)
    ours, our_host, compiled = _trained(body, transfer="copy", activations=activations)
    for step in range(3):
        for left, right in zip(eager.outputs[step], ours.outputs[step], strict=True):
            assert torch.equal(left, right)
        for name, gradient in eager.gradients[step].items():
            other = ours.gradients[step][name]
            assert (gradient is None) == (other is None), name
            assert gradient is None or (other is not None and torch.equal(gradient, other)), name
    assert all(torch.equal(tensor, ours.state[name]) for name, tensor in eager.state.items())
    assert torch.equal(eager.rng, ours.rng)
    assert host == our_host
    assert bool(compiled.megatrain.variant.opaque) == (body in RUN_AGAIN)


def test_the_program_says_what_is_opaque_and_why() -> None:
    _, _, compiled = _trained(bodies.counts_calls, transfer="copy")
    assert "opaque the model: changes the Python attribute `count` (now 2)" in str(compiled.program)


def test_a_value_with_another_outcome_selects_another_capture() -> None:
    model = bodies.Host(bodies.branches_on_weights)
    compiled = megatrain.compile(model)
    x = torch.ones(2, 3)
    with torch.no_grad():
        for scale in (1.0, -1.0, 1.0, -1.0):
            model.fc.weight.fill_(scale)
            model.fc.bias.fill_(scale)
            assert torch.equal(compiled(x), model(x))
    texts = {str(v.traced) for v in compiled.megatrain._variants}
    assert len(texts) == 2


class Count:
    """What a user's code passes around to count with."""

    def __init__(self, n: int = 0):
        self.n = n


class CountsInItsArgument(nn.Module):
    """Draws from Python, hence opaque, and writes into an object that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, count: Count) -> torch.Tensor:
        count.n += 1
        return self.fc(x) * random.random() * count.n


class GivesACount(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = CountsInItsArgument()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = Count(2)
        return self.fc(self.inner(x, count)) * count.n


class ReturnsACount(nn.Module):
    """Counts calls, hence opaque, and returns the count inside an object."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.n = 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Count]:
        self.n += 1
        return self.fc(x), Count(self.n)


class ScalesByTheCount(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ReturnsACount()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, count = self.inner(x)
        return y * count.n


@dataclass
class Counted:
    """A model's result: a tensor and a plain number that differs at each call."""

    y: torch.Tensor
    n: int


class ReturnsADataclass(ReturnsACount):
    def forward(self, x: torch.Tensor) -> Counted:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.n += 1
        return Counted(self.fc(x) * self.n, self.n)


@pytest.mark.parametrize(
    ("kind", "activations"), diagonal([GivesACount, ScalesByTheCount, ReturnsADataclass], ["recompute", "keep"])
)
def test_objects_around_an_opaque_module_are_those_of_each_call(
    kind: Callable[[], nn.Module], activations: str
) -> None:
    torch.manual_seed(0)
    model = kind()
    eager = copy.deepcopy(model)
    compiled = megatrain.compile(model, transfer="copy", activations=activations)
    for step in range(3):
        x = torch.randn(2, 3)
        found: list[Any] = []
        for call in (eager, compiled):
            random.seed(step)
            found.append(call(x))
        left, right = (x if isinstance(x, Counted) else Counted(x, 0) for x in found)
        assert left.n == right.n
        assert torch.equal(left.y, right.y)
        for side in (left, right):
            side.y.sum().backward()
        assert_same_state(eager, model)
    assert compiled.program.opaque_calls


def test_a_result_from_a_clock_is_refused() -> None:
    class Clock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            return self.fc(x) * random.random(), time.perf_counter_ns()

    with pytest.raises(megatrain.TraceError, match="must be the same when a call starts again from the same state"):
        megatrain.compile(Clock())(torch.ones(2, 3))
