"""The comparison that the other tests rely on sees each kind of difference, and names its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.comparing import assert_same_state, difference

NAN = float("nan")


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (torch.tensor(float("inf")), torch.tensor(torch.finfo(torch.float32).max)),
        (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 2.0])),
        (torch.tensor([NAN, 0.0]), torch.tensor([0.0, NAN])),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(2, 1)),
        (torch.ones(2), torch.ones(2).requires_grad_()),
        (torch.ones(2), torch.ones(2).to_sparse()),
        (torch.ones(2), None),
        (1, 1.0),
    ],
)
def test_a_difference_is_seen_and_named(expected: Any, found: Any):
    assert difference(expected, expected) is None
    text = difference({"a": [expected]}, {"a": [found]}, "outputs")
    assert text is not None
    assert text.startswith("outputs/a/0: ")
    assert difference([expected], [expected, found]) == ": only one has ['1']"


def test_a_tolerance_is_relative_to_the_largest_number():
    pair = torch.tensor([100.0, 1.0]), torch.tensor([100.0, 1.5])
    assert difference(*pair, tolerance=0.01) is None
    assert difference(*pair, tolerance=0.01, scale=1.0) is not None
    assert difference(*pair, tolerance=0.001) is not None


@pytest.mark.parametrize("what", ["weight", "gradient", "strides", "buffer"])
def test_a_state_has_parameters_gradients_their_strides_and_buffers(what: str):
    models = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model(torch.ones(2, 3)).sum().backward()
    assert_same_state(*models)
    layer: Any = models[1][0]
    with torch.no_grad():
        if what == "strides":
            layer.weight.grad = layer.weight.grad.t().contiguous().t()
        else:
            changed = {
                "weight": layer.weight,
                "gradient": layer.bias.grad,
                "buffer": models[1].get_buffer("1.running_var"),
            }
            changed[what].view(-1)[0] += 1
    with pytest.raises(AssertionError, match=f"^state/.*{what}" if what in ("strides", "gradient") else "^state/"):
        assert_same_state(*models)
