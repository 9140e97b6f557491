"""Code that no single graph can stand for trains as in eager: checks in mid-step, and modules that run again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import megatrain
from tests.runtime.harness import Trained, train
from tests.tracer import test_refusals as bodies

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


@pytest.mark.parametrize("body", [*CHECKED, *RUN_AGAIN], ids=lambda body: body.__name__)
@pytest.mark.parametrize("activations", ["recompute", "keep"])
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
    assert bool(compiled.variant.opaque) == (body in RUN_AGAIN)


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
    texts = {str(v.traced) for v in compiled._variants}
    assert len(texts) == 2
