"""Code that no single graph can stand for trains as in eager, by checks in mid-step or by running again; a model of one
opaque block is heard of."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import OpaqueModelWarning, OptionError, TraceError
from tests.comparing import assert_same
from tests.runtime.parity import Trained, train
from tests.tracer import test_refusals as bodies

ALLOWED = pytest.mark.filterwarnings("ignore:the whole model is one opaque block")

CHECKED = (
    bodies.takes_an_item,
    bodies.formats_a_value,
    bodies.reads_a_random_number,
    bodies.selects_by_weights,
)

RUN_AGAIN = (
    bodies.calls_torchscript,
    bodies.draws_from_python,
    bodies.draws_from_numpy,
    bodies.seeds_the_generator,
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


@pytest.mark.parametrize("body", [*CHECKED, *RUN_AGAIN], ids=lambda body: body.__name__)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@ALLOWED
def test_three_steps_equal_eager(body: Callable[..., Any]) -> None:
    eager, host, _ = _trained(body)
    ours, our_host, compiled = _trained(body, transfer="copy", activations="recompute")
    assert_same(eager, ours)
    assert host == our_host
    assert bool(compiled.megatrain.variant.opaque) == (body in RUN_AGAIN)


@ALLOWED
def test_the_program_says_what_is_opaque_and_why() -> None:
    _, _, compiled = _trained(bodies.counts_calls, transfer="copy")
    assert "opaque the model: changes the Python attribute `count` (now 2)" in str(compiled.program)


def test_code_around_results_of_many_kinds_is_opaque_and_said_to_be() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) if random.random() < 0.5 else x

    random.seed(0)
    model = nn.Sequential(*(Skips() for _ in range(3)))
    with pytest.raises(
        TraceError, match=r"it reads what changes from step to step: opaque 2\(\.\.\.\) returns a tensor"
    ):
        megatrain.compile(model, device="cpu", opaque="refuse")(torch.randn(2, 4))


@ALLOWED
def test_a_result_from_a_clock_is_refused() -> None:
    class Clock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            return self.fc(x) * random.random(), time.perf_counter_ns()

    with pytest.raises(megatrain.TraceError, match="must be the same when a call starts again from the same state"):
        megatrain.compile(Clock())(torch.ones(2, 3))


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) * random.random()


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Skipping()

    def forward(self, x):
        return self.inner(x) + 1


def test_a_model_of_one_opaque_block_is_heard_of_once_with_the_reason():
    compiled = megatrain.compile(Skipping(), device="cpu")
    with pytest.warns(OpaqueModelWarning, match=r"it draws from or seeds `random or numpy.random`") as caught:
        assert [compiled(torch.ones(n, 4)).shape[0] for n in (2, 3)] == [2, 3]
    assert len(caught) == 1
    assert "all weights must fit on the device" in str(caught[0].message)


def test_the_reason_names_the_users_line():
    class Asking(nn.Linear):
        def forward(self, x):
            return torch.func.vmap(super().forward)(x)

    with pytest.warns(OpaqueModelWarning, match=r"transform of torch.func at test_opaque.py:\d+"):
        megatrain.compile(Asking(4, 4), device="cpu", example_args=(torch.ones(2, 4),))


def test_it_can_be_refused():
    model = Skipping()
    compiled = megatrain.compile(model, device="cpu", opaque="refuse")
    with pytest.raises(TraceError, match=r"the whole model is one opaque block: it draws from"):
        compiled(torch.ones(2, 4))
    with pytest.raises(TraceError, match="the whole model is one opaque block"):
        compiled(torch.ones(2, 4))


def test_an_opaque_module_inside_is_nothing_to_warn_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for opaque in ("warn", "refuse"):
            megatrain.compile(Around(), device="cpu", opaque=opaque)(torch.ones(2, 4))


def test_a_choice_that_is_none_is_refused():
    with pytest.raises(OptionError, match=r'opaque="?\'?always'):
        megatrain.compile(Skipping(), opaque="always")
