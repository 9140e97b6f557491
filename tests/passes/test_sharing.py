"""dedup: layers share a template exactly if they differ in nothing but their state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatrain.passes.pipeline import lower
from megatrain.tracer.trace import trace
from tests import captures

Body = Callable[[Any, torch.Tensor], torch.Tensor]


@pytest.mark.parametrize("name", ["llama_padded", "gpt"])
def test_all_layers_share_one_template(name: str):
    program = captures.program(name)
    layers = [b.template for b in program.blocks if b.name[-1].isdigit()]
    assert len(layers) == 3
    assert len(set(layers)) == 1
    assert len(program.templates) == 3


class Layer(nn.Module):
    """A layer whose code is chosen by a function; its state has the same shapes whatever it does."""

    def __init__(self, body: Body):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.body = body

    def forward(self, x):
        return self.body(self.fc, x)


def without_grad(fc: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return fc(x)


def under_autocast(fc: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return fc(x).float()


DIFFERENT: dict[str, tuple[Body, Body]] = {
    "dropout": (lambda fc, x: F.dropout(fc(x), 0.1), lambda fc, x: F.dropout(fc(x), 0.2)),
    "literal": (lambda fc, x: fc(x) * 2, lambda fc, x: fc(x) * 3),
    "int or float": (lambda fc, x: fc(x).mul(1), lambda fc, x: fc(x).mul(1.0)),
    "sign of zero": (lambda fc, x: fc(x) + 0.0, lambda fc, x: fc(x) + -0.0),
    "operands": (lambda fc, x: fc(x) - x, lambda fc, x: x - fc(x)),
    "in place": (lambda fc, x: torch.relu(fc(x)), lambda fc, x: torch.relu_(fc(x))),
    "grad mode": (lambda fc, x: fc(x), without_grad),
    "autocast": (lambda fc, x: fc(x).float(), under_autocast),
    "view or copy": (lambda fc, x: fc(x).view(4, 4), lambda fc, x: fc(x).clone()),
    "slice": (lambda fc, x: fc(x)[0:2].repeat(2, 1), lambda fc, x: fc(x)[1:3].repeat(2, 1)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_layers_that_differ_in_code_have_their_own_templates(what: str):
    one, other = DIFFERENT[what]
    # A last one ends the forward as the others don't.
    layers = map(Layer, (one, other, one, other, lambda fc, x: fc(x).exp()))
    program = lower(trace(nn.Sequential(*layers), (torch.randn(4, 4),)))
    first, second, again, back, _ = (block.template for block in program.blocks)
    assert (first, second) == (again, back)
    assert first != second


def test_layers_that_differ_in_dtype_have_their_own_templates():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4).double())
    model[1].register_forward_hook(lambda m, a, y: y.double())
    program = lower(trace(model, (torch.randn(2, 4),)))
    assert len(program.templates) == len(program.blocks) == 3


def test_aliasing_of_what_a_layer_returns_tells_templates_apart():
    class Twice(nn.Module):
        def __init__(self, is_view: bool):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.is_view = is_view

        def forward(self, pair):
            y = self.fc(pair[0] + pair[1])
            return y, y.view(4, 4) if self.is_view else y.clone()

    def count(*flags: bool) -> int:
        model = nn.Sequential(*map(Twice, flags))
        x = torch.randn(4, 4)
        return len(lower(trace(model, ((x, x * 2),))).templates)

    assert count(True, True) == 1
    assert count(True, False) == 2
