"""A model that one graph can't stand for is refused, with the user's line, and left as it was."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.errors import TraceError
from megatrain.tracer.trace import trace


class Host(nn.Module):
    """Runs one of the functions below as its forward."""

    def __init__(self, body: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.body = body
        self.fc = nn.Linear(3, 3)
        self.register_buffer("lazy", None)
        self.loose = torch.zeros(3)
        self.hidden = None
        self.count = 0
        self.stats = {"calls": 0}
        self.is_first = True
        self.scripted = torch.jit.script(_scripted) if body is calls_torchscript else None
        self.generator = torch.Generator()
        self.not_a_number = float("nan")

    def forward(self, x):
        return self.body(self, x)


def _scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) + 1


def takes_an_item(model, x):
    return model.fc(x) * model.fc.weight.abs().max().item()


def formats_a_value(model, x):
    return model.fc(x), f"{model.fc(x).mean():.2f}"


def reads_a_random_number(model, x):
    return model.fc(x) if torch.rand(()) < 0.5 else x


def selects_by_weights(model, x):
    return model.fc(x)[model.fc(x) > 0]


def calls_torchscript(model, x):
    return model.fc(model.scripted(x))


def draws_from_python(model, x):
    return model.fc(x) * random.random()


def draws_from_numpy(model, x):
    return model.fc(x) * float(np.random.rand())


def seeds_the_generator(model, x):
    torch.manual_seed(3)
    return F.dropout(model.fc(x))


def has_its_own_generator(model, x):
    return model.fc(x) + torch.rand(3, generator=model.generator)


def counts_calls(model, x):
    model.count += 1
    return model.fc(x) * model.count


def counts_in_a_dict(model, x):
    model.stats["calls"] += 1
    return model.fc(x) * model.stats["calls"]


def carries_a_tensor(model, x):
    y = model.fc(x) if model.hidden is None else model.fc(x) + model.hidden
    model.hidden = y.detach()
    return y


def carries_an_input(model, x):
    y = model.fc(x) if model.hidden is None else model.fc(x) + model.hidden
    model.hidden = x
    return y


def makes_a_parameter(model, x):
    return model.fc(x) + nn.Parameter(torch.ones(3))


def writes_a_trained_input(model, x):
    with torch.no_grad():
        x += 1
    return model.fc(x)


def writes_a_parameter(model, x):
    with torch.no_grad():
        model.fc.weight.mul_(0.9)
    return model.fc(x)


def writes_a_loose_tensor(model, x):
    model.loose += 1
    return model.fc(x) + model.loose


def assigns_data(model, x):
    y = model.fc(x)
    y.data = y.data * 2
    return y


def assigns_requires_grad(model, x):
    y = x * 2
    y.requires_grad = True
    return model.fc(y)


def reads_a_gradient(model, x):
    return model.fc(x) if model.fc.weight.grad is None else x


def hooks_a_tensor(model, x):
    y = model.fc(x)
    y.register_hook(lambda grad: grad * 2)
    return y


def keeps_a_gradient(model, x):
    y = model.fc(x)
    y.retain_grad()
    return y * 2


def runs_backward(model, x):
    model.fc(x).sum().backward()
    return model.fc(x)


def maps_over_a_batch(model, x):
    return torch.func.vmap(model.fc)(x)


class Closing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return function(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def hides_weights_in_a_closure(model, x):
    return Closing.apply(x * 2, model.fc)


def returns_a_lock(model, x):
    import threading

    return model.fc(x), threading.Lock()


# What is refused, and words that the message must have besides the user's line.
CASES: list[tuple[Callable[..., Any], str]] = [
    (has_its_own_generator, "generator of its own"),
    (makes_a_parameter, "of unknown origin"),
    (writes_a_trained_input, "writes into its input `x`"),
    (writes_a_loose_tensor, "isn't a buffer"),
    (reads_a_gradient, r"reads `\.grad`"),
]

WITHOUT_LINE: list[tuple[Callable[..., Any], str]] = [
    (writes_a_parameter, r"parameter `fc\.weight`"),
    (returns_a_lock, "can't be copied"),
    (runs_backward, "runs a backward in the forward"),
]


def _refusal(body: Callable[..., Any]) -> str:
    torch.manual_seed(0)
    model, x = Host(body), torch.randn(2, 3, requires_grad=body is writes_a_trained_input)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = dict(model.__dict__)
    before = x.detach().clone()
    generators = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    with pytest.raises(TraceError) as caught:
        trace(model, (x,))
    assert torch.equal(x, before)
    assert torch.equal(model.loose, torch.zeros(3))
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(model.__dict__[k] is v for k, v in attributes.items())
    assert model.stats == {"calls": 0}
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (random.getstate(), str(np.random.get_state())) == generators[1:]
    return str(caught.value)


@pytest.mark.parametrize(("body", "words"), CASES, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_refusal_names_the_users_line(body: Callable[..., Any], words: str):
    message = _refusal(body)
    assert "test_refusals.py:" in message
    assert len(message.splitlines()) == 3, "what, the rule, the way out"
    assert re.search(words, message)


@pytest.mark.parametrize(("body", "words"), WITHOUT_LINE, ids=lambda x: getattr(x, "__name__", ""))
def test_an_effect_without_a_call_is_refused(body: Callable[..., Any], words: str):
    assert re.search(words, _refusal(body))


def test_tensors_hidden_in_an_argument_are_refused():
    @dataclass
    class Batch:
        x: torch.Tensor

    class Reading(nn.Linear):
        def forward(self, batch):
            return super().forward(batch.x)

    with pytest.raises(TraceError, match=r"the argument `batch` is a .*Batch with tensors in it"):
        trace(Reading(3, 3), (Batch(torch.randn(2, 3)),))


def test_a_generator_as_an_argument_is_refused_and_the_way_out_works():
    class Drawing(nn.Linear):
        def forward(self, x, generator=None):
            return super().forward(x) + torch.randn(3, generator=generator)

    model, x, generator = Drawing(3, 3), torch.randn(2, 3), torch.Generator()
    with pytest.raises(TraceError, match=r"the argument `generator` is a torch.Generator, from which the model would"):
        trace(model, (x, generator))
    compiled = megatrain.compile(model, device="cpu", transfer="copy")
    with torch.no_grad():
        assert torch.equal(compiled(x, generator.manual_seed(1)), model(x, generator.manual_seed(1)))


def test_an_exception_of_the_model_passes_unharmed_and_the_model_is_restored():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.seen: list[torch.Tensor] = []

        def forward(self, x):
            self.seen.append(self.fc(x))
            raise LookupError("the user's own")

    model = Failing()
    weight = model.fc.weight
    state = torch.get_rng_state()
    with pytest.raises(LookupError, match="the user's own"):
        trace(model, (torch.randn(2, 3),))
    torch.set_rng_state(state)
    assert model.seen == []
    assert model.fc.weight is weight
    assert "__getattribute__" not in vars(type(torch.autograd.Function))
    assert torch.nn.modules.module._global_forward_hooks == {}
    assert torch.nn.modules.module._global_forward_pre_hooks == {}


class Settings:
    """An argument that could be changed between two calls without any sign."""

    factor = 2.0


def test_an_argument_that_may_change_unseen_is_refused():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x, settings):
            return self.layer(x) * settings.factor

    with pytest.raises(TraceError, match=r"the argument `settings` is a Settings, which may change between calls"):
        trace(Scaled(), (torch.ones(1, 2),), {"settings": Settings()})
