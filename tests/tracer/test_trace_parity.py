"""A captured graph, run as a whole, leaves behind what the model itself leaves behind, bit for bit."""

from __future__ import annotations

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from megatrain.tracer.trace import trace
from tests.models import MODELS, Stack
from tests.tracer.parity import assert_same_step, eager_step, graph_step


def _description(model: nn.Module) -> dict[str, object]:
    """Everything that a capture could have changed in a model; tensors and objects by identity."""
    found: dict[str, object] = {}
    for prefix, module in model.named_modules():
        for name, value in module.__dict__.items():
            inner = value if isinstance(value, dict) else {}
            found[f"{prefix}:{name}"] = (id(value), [(str(k), id(v)) for k, v in inner.items()])
    return found


@pytest.mark.parametrize("name", list(MODELS)[1::12])
def test_a_capture_leaves_the_model_and_every_generator_alone(name: str):
    model, args, kwargs = MODELS[name]()
    before = _description(model)
    values = {k: v.clone() for k, v in model.state_dict().items()}
    inputs = copy.deepcopy((args, kwargs))
    generators = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    trace(model, args, kwargs)
    assert _description(model) == before
    assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert str((args, kwargs)) == str(inputs)
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1:] == (random.getstate(), str(np.random.get_state()))


def test_objects_and_containers_that_modules_refer_to_are_restored():
    class Log:
        latest: torch.Tensor | None = None

    class Logging(Stack):
        def __init__(self):
            super().__init__()
            self.log = Log()
            self.nested = {"seen": [], "by": {"kind": set()}}

        def forward(self, x):
            y = super().forward(x)
            self.log.latest = y
            self.nested["seen"].append(y)
            self.nested["by"]["kind"].add("call")
            self.added = y
            return y

    model = Logging()
    trace(model, (torch.randn(2, 3),))
    assert model.log.latest is None
    assert model.nested == {"seen": [], "by": {"kind": set()}}
    assert not hasattr(model, "added")


def test_the_structure_of_the_output_is_rebuilt_around_new_tensors():
    model, args, kwargs = MODELS["nested_outputs"]()
    traced = trace(model, args, kwargs)
    tensors = [torch.full((1,), float(i)) for i in range(len(traced.outputs.placeholders))]
    first, second = traced.outputs.fill(tensors), traced.outputs.fill(tensors)
    assert type(first).__name__ == "Result"
    assert type(first.extras["pair"]).__name__ == "Duo"
    assert first.extras["pair"].first is first.logits is first.extras["list"][0] is tensors[0]
    assert first.extras["list"][1][1:] == ("name", 3)
    assert first.extras is not second.extras


def test_a_returned_parameter_stays_the_parameter():
    model, args, kwargs = MODELS["returns_everything"]()
    traced = trace(model, args, kwargs)
    returned = graph_step(traced, model, args, kwargs).result
    assert returned[2] is model.head.weight
    assert returned[1] is args[0]


def test_tensors_made_in_a_loop_and_written_into_cost_one_more_run_in_all():
    runs = itertools.count()  # not a list, which a capture leaves as it was

    class Scatter(Stack):
        def forward(self, x):
            next(runs)
            x = self.stem(x)
            for block in self.blocks:
                into = torch.zeros(2, 4)
                into.index_add_(0, torch.tensor([1, 0]), block(x))
                x = x + into
            return self.head(x)

    model, args = Scatter(depth=8), (torch.randn(2, 3),)
    traced = trace(model, args)
    assert next(runs) == 2
    assert_same_step(graph_step(traced, model, args, {}), eager_step(model, args, {}))


def test_buffers_that_swap_places_are_written_back_under_their_new_names():
    class Swapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.register_buffer("older", torch.zeros(3))
            self.register_buffer("newer", torch.ones(3))
            self.register_buffer("last", torch.ones(3))

        def forward(self, x):
            self.older, self.newer = self.newer, x.detach().mean(0)
            self.last = x[0]
            return self.fc(x) + self.older

    torch.manual_seed(0)
    model, args = Swapping(), (torch.randn(2, 3),)
    traced = trace(model, args)
    step = graph_step(traced, model, args, {})
    assert_same_step(step, eager_step(copy.deepcopy(model), args, {}))
    assert {key for key, _ in traced.writes_back} == {"older", "newer", "last"}
