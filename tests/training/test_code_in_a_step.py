"""The user's code within a step sees buffers and parameters as in the loop, and what it writes stays, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import ExecuteError
from tests.comparing import assert_same, snapshot
from tests.tiers import diagonal
from tests.training.parity import MODES, loop_step

SIZE = 4
HELD: dict[str, Any] = {}


class Looking(torch.autograd.Function):
    """Comes by the user's code in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        scale: torch.Tensor = HELD["model"].layers[0].count * HELD["model"].layers[2].fc.bias.detach().norm()
        return gradient * (1 + scale)


class Layer(nn.Module):
    """Two buffers that the forward writes, one that it reads, and a weight."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.fc, self.norm, self.looks = nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), looks
        self.count: Any
        self.shift: Any
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("shift", torch.full((SIZE,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.count.add_(1)
        y = torch.tanh(self.norm(self.fc(x))) + self.shift
        return x + (Looking.apply(y) if self.looks else y)


class Net(nn.Module):
    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(looks and number == 1) for number in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batches(step: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(5, SIZE, generator=generator) for _ in range(count)]


Act = Callable[[Any], object]


@torch.no_grad()
def write_count(model: Any) -> None:
    """Of the last block and of the first."""
    for layer in (model.layers[2], model.layers[0]):
        layer.count.mul_(0.5)


def replace_count(model: Any) -> None:
    model.layers[1].count = torch.full((), 7.0)


@torch.no_grad()
def write_shift(model: Any) -> None:
    model.layers[1].shift.mul_(1.1)


@torch.no_grad()
def write_bias(model: Any) -> None:
    model.layers[0].fc.bias.mul_(1.1)


ACTS: dict[str, Act] = {
    "looks": lambda model: None,
    "writes what the forward wrote": write_count,
    "replaces what the forward wrote": replace_count,
    "writes what blocks read": write_shift,
    "writes a parameter": write_bias,
}
# Who runs the code, and of which of these acts it is refused with one micro-batch, and with several.
ON_WRITES_OF_STATE = ("writes what blocks read", "writes a parameter")
LATE = (ON_WRITES_OF_STATE, tuple(act for act in ACTS if act != "looks"))
SITES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "loss": LATE,
    "before the optimizer's step": ((), ()),
    "after the optimizer's step": ((), ()),
    "hook on a gradient": LATE,
    "hook after a gradient": LATE,
    "hook of a module's backward": LATE,
    "hook on an activation": LATE,
}


@dataclass
class Side:
    """A model, its optimizer, and what the user's code has seen at one place."""

    site: str
    act: Act
    model: Any = field(default_factory=Net)
    seen: list[Any] = field(default_factory=list[Any])

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        layer: Any = self.model.layers[1]
        if self.site == "before the optimizer's step":
            self.optimizer.register_step_pre_hook(self.look)
        elif self.site == "after the optimizer's step":
            self.optimizer.register_step_post_hook(self.look)
        elif self.site == "hook on a gradient":
            layer.fc.weight.register_hook(self.look)
        elif self.site == "hook after a gradient":
            layer.fc.weight.register_post_accumulate_grad_hook(self.look)
        elif self.site == "hook of a module's backward":
            layer.register_full_backward_hook(self.look)
        elif self.site == "hook on an activation":
            layer.register_forward_hook(lambda module, given, y: (y.register_hook(self.look), None)[1])

    def look(self, *_: Any) -> None:
        self.seen.append({name: tensor.clone() for name, tensor in self.model.state_dict().items()})
        self.act(self.model)

    def loss(self, result: Any, batch: Any) -> torch.Tensor:
        if self.site == "loss" and type(result) is torch.Tensor:  # not in the trial on tensors without values
            self.look()
            return result.square().mean() * self.model.layers[0].count
        return result.square().mean()

    def step(self, **options: Any) -> megatrain.TrainStep:
        compiled = megatrain.compile(self.model, device="cpu", memory="16KiB", transfer="copy", block_bytes=1)
        return megatrain.TrainStep(compiled, self.optimizer, loss=self.loss, **options)


@pytest.mark.parametrize(("what", "how"), diagonal(product(SITES, ACTS), product(MODES, [1, 2])))
def test_code_within_a_step_sees_what_the_loop_shows_and_its_writes_stay(
    what: tuple[str, str], how: tuple[str, int]
) -> None:
    (site, act), (mode, count) = what, how
    eager, streamed = (Side(site, ACTS[act]) for _ in range(2))
    step, clip = streamed.step(**MODES[mode]), MODES[mode].get("max_grad_norm")
    if act in SITES[site][count - 1]:
        before = snapshot(streamed.model, streamed.optimizer)
        with pytest.raises(ExecuteError, match=r"writes (buffer|parameter) `layers\.\d\.\w+(\.bias)?`, which the rest"):
            step(batches(0, count))
        streamed.seen.clear()
        if act in ("writes what the forward wrote", "replaces what the forward wrote"):
            replaced = {"layers.1.count": torch.zeros(())} if act.startswith("replaces") else {}
            streamed.model.load_state_dict(replaced, strict=False)
            assert_same(before, snapshot(streamed.model, streamed.optimizer), "after the refusal")
        return
    for number in range(2):
        given = batches(number, count)
        expected, _ = loop_step(eager.model, eager.optimizer, given, loss=eager.loss, max_norm=clip)
        assert_same(expected, step(given), "loss")
    step.flush()
    if "gradient" in site:  # hooks on parameters run once a step, with the whole gradient
        eager.seen = eager.seen[count - 1 :: count]
    assert_same(eager.seen, streamed.seen, "seen")
    assert_same(snapshot(eager.model, eager.optimizer), snapshot(streamed.model, streamed.optimizer), "after the steps")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("mode", ["spread", "serial"])
def test_a_function_whose_backward_names_the_model_sees_what_the_loop_shows(mode: str, count: int) -> None:
    eager, streamed = (Side("", ACTS["looks"], Net(looks=True)) for _ in range(2))
    step = streamed.step(**MODES[mode])
    for number in range(3):
        given = batches(number, count)
        HELD["model"] = eager.model
        expected, _ = loop_step(eager.model, eager.optimizer, given, loss=eager.loss)
        HELD["model"] = streamed.model
        assert_same(expected, step(given), "loss")
    step.flush()
    assert_same(snapshot(eager.model, eager.optimizer), snapshot(streamed.model, streamed.optimizer), "after the steps")


@pytest.mark.parametrize("site", ["loss", "hook on a gradient", "before the optimizer's step"])
def test_a_step_that_the_users_code_ends_leaves_buffers_as_they_were(site: str) -> None:
    def fail(model: Any) -> None:
        write_count(model)
        if is_failing:
            raise ValueError

    is_failing = False
    eager, streamed = (Side(site, fail) for _ in range(2))
    step = streamed.step()
    loop_step(eager.model, eager.optimizer, batches(0, 1), loss=eager.loss)
    step(batches(0, 1))
    is_failing = True
    with pytest.raises((ValueError, ExecuteError)):
        step(batches(1, 1))
    is_failing = False
    streamed.seen.pop()
    for number in (2, 3):
        loop_step(eager.model, eager.optimizer, batches(number, 1), loss=eager.loss)
        step(batches(number, 1))
    assert_same(eager.seen, streamed.seen, "seen")
    assert_same(snapshot(eager.model, eager.optimizer), snapshot(streamed.model, streamed.optimizer), "after the steps")


def test_a_loss_may_write_a_buffer_that_the_model_returns() -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(SIZE, SIZE)
            self.total: Any
            self.register_buffer("total", torch.zeros(SIZE))

        def forward(self, x: torch.Tensor) -> Any:
            with torch.no_grad():
                self.total.add_(x.sum(0))
            return self.fc(x), self.total

    def loss(result: Any, batch: Any) -> torch.Tensor:
        found = result[0].square().mean() * result[1].detach().sum()
        with torch.no_grad():
            result[1].mul_(0.5)
        return found

    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Returning())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    compiled = megatrain.compile(models[1], device="cpu", memory="16KiB", transfer="copy")
    step = megatrain.TrainStep(compiled, optimizers[1], loss=loss)
    for number in range(3):
        loop_step(models[0], optimizers[0], batches(number, 1), loss=loss)
        step(batches(number, 1))
    assert_same(snapshot(models[0], optimizers[0]), snapshot(models[1], optimizers[1]))
    with pytest.raises(ExecuteError, match=r"^the loss writes buffer `total`, which the rest of the step reads\."):
        step(batches(4, 2))


def test_a_list_that_the_forward_appends_to_has_the_items_of_all_micro_batches() -> None:
    seen: list[torch.Tensor] = []

    def watch(module: Any, given: Any, result: torch.Tensor) -> None:
        seen.append(result.detach().sum() + module.count)

    eager, streamed = (Side("", ACTS["looks"]) for _ in range(2))
    for side in (eager, streamed):
        side.model.layers[1].register_forward_hook(watch)
    step = streamed.step()
    for number in range(2):
        given = batches(number, 3)
        loop_step(eager.model, eager.optimizer, given, loss=eager.loss)
        expected = list(seen)
        seen.clear()
        step(given)
        assert_same(expected, list(seen), "what the hook has kept")
        seen.clear()
