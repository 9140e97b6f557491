"""A TrainStep leaves the bits of the plain loop: forward, backward, clip_grad_norm_, step, scheduler."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.optim.per_parameter import register, unregister
from megatrain.runtime.streams.stream_set import Chaos
from tests.comparing import assert_same, snapshot
from tests.optim.reference import Reference, assert_same_training
from tests.training.hazards import WIDTH
from tests.training.parity import (
    MODES,
    TASKS,
    SideBySide,
    fresh,
    generator_of,
    loop_step,
    sgd,
    square,
)

STEPS = 6


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def matrices(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in trained(model) if p.dim() == 2], lr=2e-2, weight_decay=0.1)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(trained(model), lr=1e-2)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model), lr=1e-2, fused=True)


class Schedule:
    """What a user changes between steps: a warm-up, and hand edits of options in the middle."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))

    def after(self, step: int) -> None:
        self.warm_up.step()
        if step == STEPS // 2:
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * 0.25
                group["weight_decay"] = group["weight_decay"] * 0.5


@pytest.mark.parametrize(
    ("name", "make", "mode", "compiled_with"),
    [
        ("llama", adafactor, "deferred", {"transfer": "bind"}),
        ("t5", fused, "overlap", {"activations": "offload"}),
        ("cnn", sgd, "serial_clipped", {"activations": "keep"}),
        ("lora", matrices, "spread", {"activations": "recompute"}),
    ],
    ids=["llama", "t5", "cnn", "lora"],
)
def test_many_steps_have_the_bits_of_the_loop(name: str, make: Any, mode: str, compiled_with: dict[str, Any]) -> None:
    task, options = TASKS[name], MODES[mode]
    eager = task.build()
    compiled = fresh(name, Chaos(seed=len(name), max_delay_s=0.0001), **compiled_with)
    expected, found = make(eager), make(compiled)
    schedules = Schedule(expected), Schedule(found)
    step = megatrain.TrainStep(compiled, found, loss=task.loss, **options)
    torch.manual_seed(7)
    generator = torch.get_rng_state()
    for number in range(STEPS):
        batch = task.batch(number % 4, 2)
        torch.set_rng_state(generator)
        loss, norm = loop_step(eager, expected, batch, loss=task.loss, max_norm=options.get("max_grad_norm"))
        drawn = torch.get_rng_state()
        torch.set_rng_state(generator)
        assert_same(loss, step(batch), f"loss of step {number}")
        assert_same(norm, step.progress.grad_norm, f"norm of step {number}")
        generator = torch.get_rng_state()
        assert_same(drawn, generator, f"generator after step {number}")
        for schedule in schedules:
            schedule.after(number)
    step.flush()
    assert_same(snapshot(eager, expected), snapshot(compiled.megatrain.model, found))
    assert step.progress.count == STEPS
    assert step.schedule.kind.updates == mode.removesuffix("_clipped")
    assert all(p.grad is None for p in compiled.megatrain.model.parameters())


# -- optimizers whose code nobody knows ------------------------------------------------------------------------------


@pytest.fixture
def promise() -> Generator[Callable[[type[torch.optim.Optimizer]], object]]:
    """Registers classes, for the time of a test."""
    kinds: list[type[torch.optim.Optimizer]] = []
    yield lambda kind: kinds.append(register(kind))
    for kind in kinds:
        unregister(kind)


class Failing(torch.optim.AdamW):
    """Divides by a norm of all gradients, and fails when everything is written."""

    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm = nn.utils.get_total_norm([p.grad for group in self.param_groups for p in group["params"]])
        self.param_groups[0]["lr"] = 0.1 / (1 + float(norm))
        self.taken = getattr(self, "taken", 0) + 1
        super().step()
        if Failing.fails:
            raise KeyError("my own error")


def test_a_step_at_once_that_fails_leaves_no_trace() -> None:
    sides = SideBySide.of("hazardous", lambda model: Failing(model.parameters()), max_grad_norm=0.5)
    for number in range(4):
        batch = [torch.randn(3, WIDTH, generator=generator_of(number + i)) for i in range(2)]
        if number in (0, 2):
            torch.manual_seed(number)
            sides.step.flush()
            before = snapshot(sides.streamed, sides.optimizer)
            Failing.fails = True
            with pytest.raises(KeyError, match="my own error"):
                sides.step(batch)
            Failing.fails = False
            assert_same(before, snapshot(sides.streamed, sides.optimizer))
        sides.take(batch, seed=number)
        assert sides.step.schedule.kind.updates == "serial"
    sides.assert_same()


class Together(torch.optim.SGD):
    """Adds a mean of all moments to all parameters, with and without a gradient; keeps gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        mean = sum(g.mean() for g in getattr(self, "kept", []))
        self.kept = [p.grad for p in parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(self.kept)
        for p in parameters:
            p.mul_(0.99).add_(mean)
            if p.grad is not None:
                self.state[p]["mean"] = self.state[p].get("mean", torch.zeros_like(p)).lerp(p.grad, 0.5)
                p.sub_(self.state[p]["mean"], alpha=0.1 / (1 + float(norm)))


def test_over_masters_it_sees_fp32_parameters_and_gradients() -> None:
    """Those of a reference that is written with nothing of megatrain."""
    model = TASKS["stack"].build()
    reference = Reference(model, Together)
    compiled = megatrain.compile(model, device="cpu", transfer="copy", precision="bf16")
    optimizer = Together(list(compiled.parameters()))
    step = megatrain.TrainStep(compiled, optimizer, loss=lambda result, batch: result.float().square().mean())
    for number in range(4):
        batch = torch.randn(4, 3, generator=generator_of(number))
        expected = reference.step((batch,), {})
        assert float(step(batch)) == expected
    loop = SimpleNamespace(compiled=compiled, model=compiled.megatrain.model, optimizer=optimizer)
    assert_same_training(reference, loop)  # pyright: ignore[reportArgumentType]


def test_a_plan_counts_all_gradients_and_copies_and_names_the_promise(promise: Callable[[type], None]) -> None:
    model = TASKS["stack"].build()
    gradients = sum(p.nbytes for p in model.parameters())
    planned = partial(megatrain.plan, model, torch.ones(2, 3), optimizer=Together, loss=square, max_grad_norm=1.0)
    found = planned()
    assert (found.schedule.kind.updates, found.host.is_estimate) == ("serial", True)
    assert found.host.bytes_of("Together.state") == 2 * gradients
    assert found.host.bytes_of("update scratch") >= 4 * gradients
    assert "megatrain.optim.per_parameter.register(Together)" in found.host.helps[0]
    promise(Together)
    assert (planned().schedule.kind.updates, planned().host.is_estimate) == ("deferred", False)
