"""Training steps on the model's own loss: what nobody reads isn't computed, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.errors import ExecuteError


@dataclass
class Result:
    """What a model returns beside its loss."""

    loss: torch.Tensor
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()


class Net(nn.Module):
    """A stack with a loss, logits, hidden states, and a second head that only the caller could read."""

    def __init__(self, make: Any = Result) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.other = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.BatchNorm1d(64))
        self.drop = nn.Dropout(0.3)
        self.make = make

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        hidden = [x]
        for layer in self.layers:
            hidden.append(layer(hidden[-1]).tanh())
        features = self.other(hidden[-1])
        logits = self.head(self.drop(hidden[-1]))  # draws behind those of the dead branch
        loss = F.cross_entropy(logits, y)
        if self.make is Result:
            return Result(loss, logits.softmax(-1), (*hidden, features))
        return self.make(loss, logits, features)


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(6, 8, generator=generator), "y": torch.randint(4, (6,), generator=generator)}


def trained(model: nn.Module, take: Any, optimizer: torch.optim.Optimizer) -> tuple[list[Any], torch.Tensor]:
    del optimizer
    torch.manual_seed(7)
    losses = [take(batch(step)) for step in range(3)]
    return [*losses, *model.state_dict().values()], torch.get_rng_state()


def by_loop(model: nn.Module, loss_of: Any = lambda result: result.loss) -> tuple[list[Any], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def take(given: Any) -> torch.Tensor:
        loss = loss_of(model(**given))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return trained(model, take, optimizer)


def by_step(model: nn.Module, **options: Any) -> tuple[list[Any], torch.Tensor, megatrain.TrainStep]:
    compiled = megatrain.compile(model, device="cpu")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    step = megatrain.TrainStep(compiled, optimizer, **options)
    values, state = trained(model, step, optimizer)
    step.flush()
    return values, state, step


def assert_same(expected: Any, found: Any) -> None:
    for one, other in zip(expected[0], found[0], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(expected[1], found[1])  # the generator


class Computes:
    """A result whose loss is computed when it is asked for."""

    def __init__(self, loss: torch.Tensor, logits: torch.Tensor, _: torch.Tensor) -> None:
        self.parts = loss, logits.softmax(-1)

    @property
    def loss(self) -> torch.Tensor:
        return self.parts[0] + 0.5 * self.parts[1].square().mean()


class Leaves(Net):
    """Leaves its logits in an attribute, where anyone may look."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        result = super().forward(x, y)
        self.latest = result.logits
        return result


def mapping(loss: torch.Tensor, logits: torch.Tensor, features: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"loss": loss, "logits": logits, "features": features}


def of_hidden(result: Any, *_: Any) -> torch.Tensor:
    return result.loss + 0.1 * (result.logits.sum() + result.hidden[1].square().mean())


def twice(result: Any, *_: Any) -> torch.Tensor:
    return 2 * result.loss


# The model, the loop's loss, the step's options, and how many values the step computes.
STEPS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any], int]] = {
    "an object": (Net, lambda r: r.loss, {}, 1),
    "a mapping": (lambda: Net(mapping), lambda r: r["loss"], {}, 1),
    "a property": (lambda: Net(Computes), lambda r: r.loss, {}, 2),
    "a loss of all": (Net, of_hidden, {"loss": of_hidden}, 7),
    "a loss of the loss": (Net, twice, {"loss": twice, "reads": "loss"}, 1),
    "an attribute": (Leaves, lambda r: r.loss, {}, 2),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_computes_what_is_read_with_the_loops_bits(name: str):
    make, loss_of, options, count = STEPS[name]
    model = make()
    loop = copy.deepcopy(model)
    expected = by_loop(loop, loss_of)
    *found, step = by_step(model, **options)
    assert_same(expected, found)
    assert len([ref for ref in step.program.outputs if ref.kind == "value"]) == count
    assert torch.equal(getattr(loop, "latest", torch.zeros(1)), getattr(model, "latest", torch.zeros(1)))
    # The dead branch stays as far as it draws random numbers and writes buffers, both of which later numbers read.
    assert ("softmax" in str(step.program)) == (count > 1)
    assert "F.dropout" in str(step.program)
    assert "batch_norm" in str(step.program)


READS: dict[str, Any] = {
    "a value": lambda r: r.logits[0, 0].item(),
    "a sum": lambda r: r.hidden[1].sum(),
    "a cast first": lambda r: r.logits.float().detach().argmax(-1),
    "a comparison": lambda r: bool((r.logits > 0).any()),
    "numpy": lambda r: r.logits.numpy(),
    "a move": lambda r: r.logits.to("cpu"),
}


@pytest.mark.parametrize("reads", READS)
def test_reading_what_isnt_computed_is_an_error_and_updates_nothing(reads: str):
    model = Net()
    before = copy.deepcopy(model.state_dict())

    def loss(result: Any, _: Any) -> torch.Tensor:
        READS[reads](result)
        return result.loss

    compiled = megatrain.compile(model, device="cpu")
    step = megatrain.TrainStep(compiled, torch.optim.AdamW(compiled.parameters()), loss=loss, reads="loss")
    with pytest.raises(ExecuteError, match="doesn't compute") as error:
        step(batch(0))
    assert 'reads="loss"' in str(error.value)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_hook_that_looks_at_logits_keeps_them():
    def watched() -> tuple[nn.Module, list[torch.Tensor]]:
        model, seen = Net(), []
        model.other[0].register_forward_hook(lambda _module, _args, out: seen.append(out.detach().clone()))
        return model, seen

    (loop, expected), (model, seen) = watched(), watched()
    by_loop(loop)
    *_, step = by_step(model)
    assert len([ref for ref in step.program.outputs if ref.kind == "value"]) == 1
    assert all(torch.equal(one, other) for one, other in zip(expected, seen[-3:], strict=True))


def test_a_plan_counts_what_its_step_computes():
    given = batch(0)
    plan = megatrain.plan(Net(), example_kwargs=given, device_memory="1MiB", optimizer="AdamW")
    whole = megatrain.plan(
        Net(), example_kwargs=given, device_memory="1MiB", optimizer="AdamW", loss=lambda result, _: result.loss
    )
    assert len(plan.program.outputs) < len(whole.program.outputs)
    compiled = megatrain.compile(Net(), device="cpu", memory="1MiB")
    step = megatrain.TrainStep(compiled, torch.optim.AdamW(compiled.parameters()), spread=True)
    step(given)
    assert step.prepare(given).device_bytes == plan.schedule.device_bytes
