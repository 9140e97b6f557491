"""Blocks that the device updates: the bits of the host's updates, whatever happens between steps, in exact memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import ExecuteError
from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import DEVICE, ORDERS, SLOW_HOST, choose, held_bytes
from tests.training.parity import generator_of

WIDTH = 64


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def batch(number: int, rows: int = 8, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, generator=generator_of(number)).to(DEVICE)


def loss_of(result: torch.Tensor, batch: Any) -> torch.Tensor:
    del batch
    return result.float().square().mean()


class Training:
    """Steps of one model with AdamW of two groups and a schedule of learning rates; the same each time.

    Args:
        is_there: Whether a machine is given on which updates on the device are worth their memory.
        loss: Of a result.
        width: Of the model.
        options: Of `compile`.
    """

    def __init__(self, *, is_there: bool = True, loss: Any = loss_of, width: int = WIDTH, **options: Any) -> None:
        torch.manual_seed(0)
        self.is_there, self.width = is_there, width
        self.model: Any = nn.Sequential(*(Block(width) for _ in range(4)))
        given = {"precision": "bf16", **({"hardware": SLOW_HOST} if is_there else {}), **options}
        self.compiled = megatrain.compile(self.model, device=DEVICE, **given)
        layers, is_whole = list(self.model), given["precision"] == "fp32"
        groups = [
            {"params": [p for layer in layers[:2] for p in layer.parameters()], "weight_decay": 0.1},
            {"params": [p for layer in layers[2:] for p in layer.parameters()], "betas": (0.3, 0.9), "maximize": True},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=is_whole)
        self.rates = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.step = megatrain.TrainStep(self.compiled, self.optimizer, loss=loss)
        self.there: list[tuple[int, ...]] = []

    def take(self, number: int, *, count: int = 1, rows: int = 8) -> torch.Tensor:
        batches = [batch(10 * number + m, rows, self.width) for m in range(count)]
        loss = self.step(batches if count > 1 else batches[0])
        self.rates.step()
        self.there.append(self.step.schedule.device_updates)
        return loss.cpu()

    def state(self) -> list[torch.Tensor]:
        """All that training has changed, through the user's own objects."""
        parameters = [parameter.detach().clone() for parameter in self.model.parameters()]
        states = [self.optimizer.state[p][name] for p in self.model.parameters() for name in self.optimizer.state[p]]
        halves = (getattr(master, "low", torch.zeros(0)) for master in self.compiled.masters.values())
        return [*parameters, *(state.clone() for state in states), *(low.clone() for low in halves)]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("precision", "count", "memory", "there"),
    [
        ("bf16", 1, "16MiB", (0, 1, 2, 3)),
        ("bf16", 3, "1MiB", None),
        ("fp32", 2, "16MiB", (0, 1, 2, 3)),
    ],
)
def test_steps_have_the_bits_of_the_hosts_updates_in_any_order(
    sim: Simulator, precision: str, count: int, memory: str, there: tuple[int, ...] | None
):
    host = Training(is_there=False, precision=precision)
    losses = [host.take(number, count=count) for number in range(4)]
    assert set(host.there) == {()}
    for seed, order in enumerate(("late", "seeded") if there is None else ("late but compute",)):
        one = Training(precision=precision, memory=memory)
        choose(sim, order, one.compiled, seed)
        assert [one.take(number, count=count) for number in range(4)] == losses
        choose(sim, "early")
        assert_same(one.state(), host.state())
        assert one.there[-1] == there or (there is None and 0 < len(one.there[-1]) < 4)


def busy(training: Training, folder: Path) -> tuple[list[torch.Tensor], Training]:
    """Steps with all that somebody may do between them; returns what was seen, and the training at its end."""
    seen = [training.take(0), training.take(1)]
    seen.append(training.model[1].up.weight.float().norm())  # a look
    seen += [training.take(2), training.take(3)]
    with torch.no_grad():
        training.model[2].down.weight.mul_(0.5)
    seen += [training.take(4), training.take(5)]
    with torch.no_grad():
        seen.append(training.compiled(batch(77)).cpu())  # other slots
    seen += [training.take(6), training.take(7, rows=16), training.take(8), training.take(9, count=2)]
    for parameter in training.model[1].parameters():
        parameter.requires_grad_(False)
    seen += [training.take(10), training.take(11)]
    for parameter in training.model[1].parameters():
        parameter.requires_grad_(True)
    training.optimizer.param_groups[0]["lr"] = 0.05
    seen += [training.take(12), training.take(13)]
    training.step.save(folder, scheduler=training.rates)
    seen.append(training.take(14))
    # Where the state of the optimizer was when it was saved doesn't matter.
    again = Training(is_there=not training.is_there)
    again.step = megatrain.TrainStep.load(folder, again.compiled, again.optimizer, scheduler=again.rates, loss=loss_of)
    assert torch.equal(again.take(14), seen[-1])
    assert_same(again.state(), training.state())
    return seen, training


def test_looks_writes_calls_other_batches_freezing_and_checkpoints_change_nothing(sim: Simulator, tmp_path: Path):
    host, device = Training(is_there=False), Training()
    expected, _ = busy(host, tmp_path / "host")
    found, _ = busy(device, tmp_path / "device")
    assert_same(found, expected)
    assert_same(device.state(), host.state())
    assert all(device.there)
    assert [1 in blocks for blocks in device.there[9:13]] == [True, False, False, True]


@pytest.mark.parametrize("count", [1, 3])
def test_steps_run_in_exactly_the_memory_of_the_schedule(sim: Simulator, count: int):
    torch.accelerator.empty_cache()
    sim.configure(segments=False)
    # Each tensor is a multiple of the 512 bytes to which the allocator rounds.
    plain, one = held_bytes(), Training(memory="30MiB", activations="recompute", width=256)
    one.take(0, count=count)
    assert one.step.schedule.device_updates
    sim.configure(capacity=plain + one.step.schedule.device_bytes)
    for seed, order in enumerate(ORDERS):
        choose(sim, order, one.compiled, seed)
        held_bytes()
        torch.accelerator.reset_peak_memory_stats()
        one.take(seed + 1, count=count)
        torch.accelerator.synchronize()
        assert torch.accelerator.max_memory_reserved() <= plain + one.step.schedule.device_bytes, order


def test_a_write_through_an_older_view_is_told_and_lost(sim: Simulator):
    one, other = Training(), Training(is_there=False)
    for training in (one, other):
        training.take(0)
    view = one.model[0].up.weight.detach()
    for training in (one, other):
        training.take(1)
    view.zero_()
    with pytest.raises(ExecuteError, match="was written through another tensor"):
        one.take(2)
    assert torch.equal(one.take(2), other.take(2))
    view.zero_()
    with pytest.raises(ExecuteError, match="was written through another tensor"):
        one.model[0].up.weight.sum()
    assert_same(one.state(), other.state())


def test_an_update_that_ends_in_the_middle_ends_training(sim: Simulator, monkeypatch: pytest.MonkeyPatch):
    from megatrain.optim.fast import on_device

    one, made, fused = Training(), list[int](), on_device.fused_update
    one.take(0)

    def failing(*args: Any, **kwargs: Any) -> None:
        made.append(0)
        if len(made) == 3:
            raise RuntimeError("no more")
        fused(*args, **kwargs)

    monkeypatch.setattr(on_device, "fused_update", failing)
    with pytest.raises(RuntimeError, match="no more"):
        one.take(1)
    monkeypatch.undo()
    with pytest.raises(ExecuteError, match="in the middle of a"):
        one.take(2)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_grad_norm": 1.0}, "updates wait for a norm of all gradients"),
        ({"overlap": False}, "updates wait for all gradients"),
    ],
)
def test_other_steps_are_updated_by_the_host_alone(sim: Simulator, options: dict[str, Any], why: str):
    one = Training()
    model = nn.Sequential(Block(), Block())
    plan = megatrain.plan(
        model,
        batch(0).cpu(),
        precision="bf16",
        loss=loss_of,
        optimizer="AdamW",
        hardware=SLOW_HOST,
        device_memory="64MiB",
        **options,
    )
    assert f"The host makes all updates: {why}" in plan.why()
    step = megatrain.TrainStep(one.compiled, one.optimizer, loss=loss_of, **options)
    step(batch(0))
    assert step.schedule.device_updates == ()
