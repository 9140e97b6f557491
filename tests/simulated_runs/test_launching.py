"""The launching thread waits for the device once per training step, at its end; generators and buffers go with it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.device import Accelerator
from megatrain.tracer.recording.random_numbers import kept_rng
from tests.simulated_device import Simulator, Synchronization
from tests.tiers import diagonal, wide
from tests.training.parity import MODES, TASKS, TELLING_MODES, adamw


def on_device(batch: Any, device: str = "sim") -> Any:
    if isinstance(batch, dict):
        return {key: tensor.to(device) for key, tensor in batch.items()}
    return tuple(tensor.to(device) for tensor in batch) if isinstance(batch, tuple) else batch.to(device)


def batches(name: str, number: int, count: int) -> list[Any]:
    return [on_device(TASKS[name].batch(10 * number + i, 2)) for i in range(count)]


def stepping(name: str, mode: str, model: nn.Module, **options: Any) -> tuple[nn.Module, megatrain.TrainStep]:
    compiled = megatrain.compile(model, device="sim", memory="8MiB", activations="offload")
    return model, megatrain.TrainStep(compiled, adamw(model), loss=TASKS[name].loss, **options, **MODES[mode])


def on_launching_threads(found: list[Synchronization]) -> list[str]:
    return [str(one) for one in found if not one.thread.startswith("megatrain-")]


@pytest.mark.parametrize(("mode", "task"), diagonal(MODES, [("gpt", 1), ("llama", 2), ("cnn", 1), ("cnn", 3)]))
def test_the_launching_thread_waits_at_the_end_alone(sim: Simulator, task: tuple[str, int], mode: str):
    name, count = task
    _, step = stepping(name, mode, TASKS[name].build())
    for number in range(2):
        step(batches(name, number, count))
    given = batches(name, 2, count)
    with sim.synchronizations() as found:
        step(given)
    waits = on_launching_threads(found)
    # BatchNorm's statistics are brought to the host before each loss, whose code may read them; nothing else waits.
    assert len(waits) == (count if name == "cnn" else 0), waits
    with sim.synchronizations() as found:
        step(batches(name, 3, count))
    assert not any("run.py" in wait or "call.py" in wait for wait in waits)


def num_labels(batch: Any) -> torch.Tensor:
    return (batch["labels"] > 5).sum()


@pytest.mark.parametrize("mode", TELLING_MODES)
def test_weights_on_the_device_are_not_waited_for(sim: Simulator, mode: str):
    def on_host(batch: Any) -> int:
        return int(num_labels(batch))

    begun, found = TASKS["llama"].build(), list[Any]()
    for weight in (num_labels, on_host):
        model, step = stepping("llama", mode, copy.deepcopy(begun), weight=weight)
        torch.manual_seed(3)
        result = [step(batches("llama", number, 3)).item() for number in range(2)]
        given = batches("llama", 2, 3)
        with sim.synchronizations() as waits:
            loss = step(given)
        assert len(on_launching_threads(waits)) == (0 if weight is num_labels else 3)
        step.flush()
        found.append(([*result, loss.item()], [p.detach().clone() for p in model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


NAN = float("nan")


@pytest.mark.parametrize(
    ("mode", "counts"),
    [
        *((mode, (NAN, 1.0)) for mode in ("overlap", "deferred")),
        *(wide((mode, (NAN, 1.0))) for mode in ("serial", "serial_clipped")),
        *(("overlap", one) for one in ((0.0, 0.0), (-1.0, 2.0))),
    ],
)
def test_wrong_weights_on_the_device_are_refused_and_leave_no_trace(
    sim: Simulator, mode: str, counts: tuple[float, float]
):
    rest: list[float] = []
    model, step = stepping(
        "llama", mode, TASKS["llama"].build(), weight=lambda batch: torch.full((), rest.pop(0), device="sim")
    )
    rest[:] = [1.0, 2.0]
    step(batches("llama", 0, 2))
    step.flush()
    before = [p.detach().clone() for p in model.parameters()]
    rest[:] = counts
    with pytest.raises(megatrain.OptionError, match=r"^weight= counts the micro-batches as"):
        step(batches("llama", 1, 2))
    assert step.progress.count == 1
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    rest[:] = [1.0, 0.0]
    step(batches("llama", 2, 2))


@pytest.mark.parametrize("mode", ["overlap", "deferred"])
def test_buffers_have_the_same_bits_in_any_order_of_the_streams(sim: Simulator, mode: str):
    found: list[dict[str, torch.Tensor]] = []
    begun = TASKS["cnn"].build()
    for order in ("early", "late", "seeded"):
        model, step = stepping("cnn", mode, copy.deepcopy(begun))
        sim.order(order)
        for number in range(3):
            step(batches("cnn", number, 2))
        step.flush()
        found.append({key: tensor.clone() for key, tensor in model.state_dict().items()})
        sim.order("early")
    for other in found[1:]:
        assert all(torch.equal(tensor, other[key]) for key, tensor in found[0].items())
    assert int(next(tensor for key, tensor in found[0].items() if "num_batches" in key)) == 6


def test_calls_write_buffers_with_one_wait(sim: Simulator):
    model = TASKS["cnn"].build()
    eager = copy.deepcopy(model).to("sim")
    compiled = megatrain.compile(model, device="sim", memory="8MiB")
    for number in range(3):
        (x,) = on_device(TASKS["cnn"].batch(number, 2))
        with sim.synchronizations() as found:
            result = compiled(x)
        assert torch.equal(result, eager(x))
        # One for the weights, which the caller may write into now, and one for all buffers.
        assert number == 0 or len(on_launching_threads(found)) == 2
        result.sum().backward()
    for key, tensor in eager.state_dict().items():
        assert torch.equal(tensor.cpu(), model.state_dict()[key]), key


def losses(step: Any, name: str, numbers: range, device: str) -> list[float]:
    return [step(on_device(TASKS[name].batch(number, 2), device)).item() for number in numbers]


@pytest.mark.parametrize(
    ("before", "after"), [("sim:0", "sim:1"), wide(("sim:1", "sim:0")), ("sim:0", "cpu"), ("cpu", "sim:0")]
)
def test_a_training_with_dropout_goes_on(sim: Simulator, tmp_path: Path, before: str, after: str):
    def build(device: str) -> tuple[megatrain.CompiledModule, torch.optim.Optimizer]:
        model = TASKS["llama"].build()
        return megatrain.compile(model, device=device, memory="8MiB"), adamw(model)

    compiled, optimizer = build(before)
    step = megatrain.TrainStep(compiled, optimizer)
    losses(step, "llama", range(2), before)
    step.save(tmp_path / "run")
    expected = losses(step, "llama", range(2, 4), before)
    found: list[list[float]] = []
    for seed in range(2):
        for index in range(2):
            torch.get_device_module("sim").set_rng_state(
                torch.Generator(f"sim:{index}").manual_seed(seed).get_state(), index
            )
        compiled, optimizer = build(after)
        if before[:3] == after[:3]:
            resumed = megatrain.TrainStep.load(tmp_path / "run", compiled, optimizer)
        else:
            with pytest.warns(megatrain.ResumeWarning, match="the checkpoint's random numbers were drawn on"):
                resumed = megatrain.TrainStep.load(tmp_path / "run", compiled, optimizer)
        found.append(losses(resumed, "llama", range(2, 4), after))
    assert found[0] == found[1]
    assert (found[0] == expected) == (before[:3] == after[:3])


def test_only_the_generator_of_the_compute_device_moves(sim: Simulator):
    model, module = TASKS["llama"].build(), torch.get_device_module("sim")
    states = [module.get_rng_state(index) for index in range(2)]
    with kept_rng(Accelerator("sim", 1)):
        torch.rand(3, device="sim:1")
    assert torch.equal(module.get_rng_state(1), states[1])
    compiled = megatrain.compile(model, device="sim:1", memory="8MiB")
    step = megatrain.TrainStep(compiled, adamw(model))
    step([on_device(TASKS["llama"].batch(number, 2), "sim:1") for number in range(3)])
    assert torch.equal(module.get_rng_state(0), states[0])
    assert not torch.equal(module.get_rng_state(1), states[1])
