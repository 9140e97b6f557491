"""What the host may do and what it waits for: writes after calls, other streams, losses, buffers, random numbers."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.device import find
from megatrain.optim.grad_scaler import host_scaler, warn_of_torchs_own
from tests.comparing import assert_same
from tests.simulated_device.simulator import OrderName, Simulator
from tests.simulated_runs.on_device import (
    DEVICE,
    Chain,
    compiled_copy,
    eager_copy,
    host_copy,
    on_device,
    on_launching_threads,
)
from tests.training.parity import MODES, TASKS, adamw, generator_of


def chain(**options: object) -> tuple[megatrain.CompiledModule, nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Chain()
    return *compiled_copy(model, block_bytes=1, **options), eager_copy(model)


@pytest.mark.parametrize("order", ["late", "seeded"])
def test_the_host_may_write_weights_after_calls_on_streams_that_it_has_not_ordered(sim: Simulator, order: OrderName):
    """Slots that a later call fills too early hold other weights."""
    compiled, model, eager = chain()
    module = torch.get_device_module(DEVICE)
    inputs = [torch.randn(4, 32).to(DEVICE) for _ in range(4)]
    expected, found = list[torch.Tensor](), list[torch.Tensor]()
    with torch.no_grad():
        for x in inputs:
            expected.append(eager(x).cpu())
            for parameter in eager.parameters():
                parameter.mul_(-2)
        torch.accelerator.synchronize()
        sim.order(order)
        for number, x in enumerate(inputs):
            # Allocated on streams of their own, as eager's are.
            with module.stream(torch.Stream(device=DEVICE) if number % 2 else None):
                found.append(compiled(x))
            for parameter in model.parameters():
                parameter.mul_(-2)
    torch.accelerator.synchronize()
    assert_same(expected, host_copy(found))


def test_a_call_blocks_on_the_host_only_for_what_reads_its_memory(sim: Simulator):
    compiled, _, _ = chain()
    x = torch.randn(4, 32).to(DEVICE)
    with torch.no_grad():
        compiled(x)
        sim.order("late")
        with sim.synchronizations() as found:
            compiled(x)
    assert [(one.kind, one.thread) for one in found] == [("event", "MainThread")]


# -- what a step waits for ---------------------------------------------------------------------------------------


def batches(name: str, number: int, count: int) -> list[Any]:
    return [on_device(TASKS[name].batch(10 * number + i, 2)) for i in range(count)]


def stepping(name: str, mode: str, model: nn.Module, **options: Any) -> tuple[nn.Module, megatrain.TrainStep]:
    compiled = megatrain.compile(model, device=DEVICE, memory="8MiB", activations="offload")
    return model, megatrain.TrainStep(compiled, adamw(model), loss=TASKS[name].loss, **options, **MODES[mode])


@pytest.mark.parametrize(
    ("name", "count", "mode"), [("cnn", 3, "deferred"), pytest.param("gpt", 1, "spread", marks=pytest.mark.nightly)]
)
def test_the_launching_thread_waits_at_the_end_alone(sim: Simulator, name: str, count: int, mode: str):
    _, step = stepping(name, mode, TASKS[name].build())
    for number in range(2):
        step(batches(name, number, count))
    given = batches(name, 2, count)
    with sim.synchronizations() as found:
        step(given)
    waits = on_launching_threads(found)
    # BatchNorm's statistics are brought to the host before each loss, whose code may read them; nothing else waits.
    assert len(waits) == (count if name == "cnn" else 0), waits
    assert not any("run.py" in wait or "call.py" in wait for wait in waits)


def test_wrong_weights_on_the_device_are_refused_and_leave_no_trace(sim: Simulator):
    rest: list[float] = []
    model, step = stepping(
        "stack", "deferred", TASKS["stack"].build(), weight=lambda batch: torch.full((), rest.pop(0), device=DEVICE)
    )
    for taken, counts in enumerate(((float("nan"), 1.0), (0.0, 0.0), (-1.0, 2.0)), start=1):
        rest[:] = [1.0, 2.0]
        step(batches("stack", taken, 2))
        step.flush()
        before = [p.detach().clone() for p in model.parameters()]
        rest[:] = counts
        with pytest.raises(megatrain.OptionError, match=r"^weight= counts the micro-batches as"):
            step(batches("stack", 9, 2))
        assert step.progress.count == taken
        assert_same(before, [p.detach() for p in model.parameters()])


def test_calls_and_steps_write_buffers_with_one_wait_in_any_order_of_the_streams(sim: Simulator):
    begun = TASKS["cnn"].build()
    eager, model = copy.deepcopy(begun).to(DEVICE), copy.deepcopy(begun)
    compiled = megatrain.compile(model, device=DEVICE, memory="8MiB")
    for number in range(3):
        (x,) = on_device(TASKS["cnn"].batch(number, 2))
        with sim.synchronizations() as found:
            result = compiled(x)
        assert torch.equal(result, eager(x))
        # One for the weights, which the caller may write into now, and one for all buffers.
        assert number == 0 or len(on_launching_threads(found)) == 2
        result.sum().backward()
    assert_same({k: t.cpu() for k, t in eager.state_dict().items()}, dict(model.state_dict()))
    states: list[dict[str, torch.Tensor]] = []
    for order in ("early", "late"):
        model, step = stepping("cnn", "deferred", copy.deepcopy(begun))
        sim.order(order)
        for number in range(2):
            step(batches("cnn", number, 2))
        step.flush()
        states.append({key: tensor.clone() for key, tensor in model.state_dict().items()})
        sim.order("early")
    assert_same(states[0], states[1])


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize(("before", "after"), [("sim:0", "sim:1"), ("sim:0", "cpu"), ("cpu", "sim:0")])
def test_a_training_with_dropout_goes_on(sim: Simulator, tmp_path: Path, before: str, after: str):
    def losses(step: megatrain.TrainStep, numbers: range, device: str) -> list[float]:
        return [step(torch.randn(4, 8, generator=generator_of(number)).to(device)).item() for number in numbers]

    def build(device: str) -> tuple[megatrain.CompiledModule, torch.optim.Optimizer]:
        model = Dropping()
        return megatrain.compile(model, device=device, memory="8MiB"), adamw(model)

    module = torch.get_device_module(DEVICE)
    step = megatrain.TrainStep(*build(before))
    losses(step, range(2), before)
    step.save(tmp_path / "run")
    expected = losses(step, range(2, 4), before)
    found: list[list[float]] = []
    for seed in range(2):
        for index in range(2):
            module.set_rng_state(torch.Generator(f"sim:{index}").manual_seed(seed).get_state(), index)
        made, is_same = build(after), before[:3] == after[:3]
        warns = nullcontext() if is_same else pytest.warns(megatrain.ResumeWarning, match="random numbers were drawn")
        with warns:
            resumed = megatrain.TrainStep.load(tmp_path / "run", *made)
        if after == "sim:1":
            other = module.get_rng_state(0)
        found.append(losses(resumed, range(2, 4), after))
        if after == "sim:1":  # only the generator of the compute device moves
            assert torch.equal(module.get_rng_state(0), other)
    assert found[0] == found[1]
    assert (found[0] == expected) == is_same


# -- code of trainers --------------------------------------------------------------------------------------------


def code(called: Callable[[Any], torch.Tensor], x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
    """What a trainer does with one micro-batch: it reads the result, writes into a loss, keeps a metric."""
    result = called(x)
    loss = result.logsumexp(-1).sum() + x.mean()
    loss *= 0.5
    kept.append(result.detach().max())
    (loss / 3).backward()
    return loss.detach() / 3


# -- loss scaling ------------------------------------------------------------------------------------------------


def scaled_steps(scaler: torch.amp.GradScaler, factors: list[float]) -> tuple[list[bool], float]:
    """Trains with losses multiplied by factors; returns which steps were taken, and the scale at the end."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    compiled = megatrain.compile(model, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken: list[bool] = []
    for factor in factors:
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(compiled(torch.ones(2, 3, device=DEVICE)).sum() * factor).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        taken.append(not torch.equal(model.weight, before))
    assert bool(model.weight.isfinite().all())
    return taken, scaler.get_scale()


@pytest.mark.parametrize("order", ["late", "seeded"])
def test_an_update_with_infinite_gradients_is_left_out(sim: Simulator, order: OrderName):
    sim.order(order)
    taken, scale = scaled_steps(megatrain.GradScaler(init_scale=8.0), [1.0, float("inf"), 1.0, float("nan"), 1.0])
    assert taken == [True, False, True, False, True]
    assert scale == 2.0


def warned(make: Any) -> list[Any]:
    gc.collect()  # scalers of other tests
    kept = make()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_torchs_own([torch.float16], find(DEVICE))
    del kept
    return [each for each in said if each.category is megatrain.GradScalerWarning]


def test_torchs_own_scaler_is_warned_of(sim: Simulator):
    assert not warned(megatrain.GradScaler)
    assert warned(lambda: torch.amp.GradScaler("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_torchs_own([torch.float16], find("cpu"))
        warn_of_torchs_own([torch.bfloat16], find(DEVICE))


def test_it_goes_on_from_another_scaler(sim: Simulator):
    other = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3, backoff_factor=0.25)
    scaler = host_scaler(other)
    assert scaler.state_dict() == other.state_dict()
    assert scaled_steps(scaler, [1.0, float("inf")]) == ([True, False], 1.0)
