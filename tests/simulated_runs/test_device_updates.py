"""Blocks that the device updates: the bits of the host's updates, whatever happens between steps, in exact memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import ExecuteError
from megatrain.runtime.streams.stream import Chaos, InjectedFailure
from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import DEVICE, ORDERS, SLOW_HOST, choose, held_bytes
from tests.training.parity import generator_of

WIDTH = 64
NO_NORM: Mapping[str, Any] = {}
CLIPPED: Mapping[str, Any] = {"max_grad_norm": 1e-3}
HOST_ONLY: Mapping[str, Any] = {"memory": "400KiB"}
REPORTED: Mapping[str, Any] = {"report_norm": True}


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
        is_there: Whether the device has room for more than the weights of a few blocks.
        loss: Of a result.
        width: Of the model.
        norm: Of `TrainStep`.
        frozen: Names of what isn't trained.
        options: Of `compile`.
    """

    def __init__(
        self,
        *,
        is_there: bool = True,
        loss: Any = loss_of,
        width: int = WIDTH,
        norm: Mapping[str, Any] = NO_NORM,
        frozen: Sequence[str] = (),
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.is_there, self.width, self.norm = is_there, width, norm
        self.model: Any = nn.Sequential(*(Block(width) for _ in range(4)))
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        given = {"precision": "bf16", "hardware": SLOW_HOST, **options, **({} if is_there else HOST_ONLY)}
        self.compiled = megatrain.compile(self.model, device=DEVICE, **given)
        layers, is_whole = list(self.model), given["precision"] == "fp32"
        groups = [
            {"params": [p for layer in layers[:2] for p in layer.parameters()], "weight_decay": 0.1},
            {"params": [p for layer in layers[2:] for p in layer.parameters()], "betas": (0.3, 0.9), "maximize": True},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=is_whole)
        self.rates = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.step = megatrain.TrainStep(self.compiled, self.optimizer, loss=loss, **norm)
        self.there: list[tuple[int, ...]] = []

    def take(self, number: int, *, count: int = 1, rows: int = 8) -> torch.Tensor:
        batches = [batch(10 * number + m, rows, self.width) for m in range(count)]
        loss = self.step(batches if count > 1 else batches[0])
        self.rates.step()
        self.there.append(self.step.schedule.device_updates)
        return loss.cpu()

    @property
    def grad_norm(self) -> torch.Tensor | None:
        return self.step.progress.grad_norm

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
    ("precision", "count", "memory", "there", "norm"),
    [
        ("bf16", 1, "16MiB", (0, 1, 2, 3), NO_NORM),
        ("bf16", 3, "1MiB", None, NO_NORM),
        ("fp32", 2, "16MiB", (0, 1, 2, 3), NO_NORM),
        ("bf16", 1, "16MiB", (0, 1, 2, 3), CLIPPED),
        ("bf16", 3, "1MiB", None, CLIPPED),
        ("fp32", 2, "1MiB", None, REPORTED),
    ],
)
def test_steps_have_the_bits_of_the_hosts_updates_in_any_order(
    sim: Simulator, precision: str, count: int, memory: str, there: tuple[int, ...] | None, norm: Mapping[str, Any]
):
    host = Training(is_there=False, precision=precision, norm=norm)
    expected = [(host.take(number, count=count), host.grad_norm) for number in range(4)]
    assert set(host.there) == {()}
    for seed, order in enumerate(("late", "seeded") if there is None else ("late but compute",)):
        one = Training(precision=precision, memory=memory, norm=norm)
        choose(sim, order, one.compiled, seed)
        found = [(one.take(number, count=count), one.grad_norm) for number in range(4)]
        choose(sim, "early")
        assert found == expected
        assert all(total > CLIPPED["max_grad_norm"] for _, total in found if total is not None)
        assert_same(one.state(), host.state())
        assert one.there[-1] == there or (there is None and 0 < len(one.there[-1]) < 4)


FROZEN = ("1.up.weight", "2.up.weight", "2.up.bias")


@pytest.mark.parametrize("norm", [NO_NORM, CLIPPED])
def test_what_is_frozen_of_a_block_stays_there_until_somebody_writes_it(sim: Simulator, norm: Mapping[str, Any]):
    host, device = (Training(is_there=is_there, frozen=FROZEN, norm=norm) for is_there in (False, True))
    for number in range(6):
        assert torch.equal(device.take(number), host.take(number)), number
        for training in (host, device):
            frozen = training.model[1].up.weight if number < 3 else training.model[2].up.weight
            with torch.no_grad():
                if number % 3 == 1:
                    frozen.mul_(-2)
                elif number % 3 == 2:
                    frozen.data.mul_(-3)  # which torch doesn't count
    assert device.there == [(0, 1, 2, 3)] * 6
    assert_same(device.state(), host.state())


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
    again = Training(is_there=not training.is_there, norm=training.norm)
    parts = again.compiled, again.optimizer
    again.step = megatrain.TrainStep.load(folder, *parts, scheduler=again.rates, loss=loss_of, **again.norm)
    assert torch.equal(again.take(14), seen[-1])
    assert_same(again.state(), training.state())
    return seen, training


@pytest.mark.parametrize("norm", [NO_NORM, CLIPPED])
def test_looks_writes_calls_other_batches_freezing_and_checkpoints_change_nothing(
    sim: Simulator, tmp_path: Path, norm: Mapping[str, Any]
):
    host, device = Training(is_there=False, norm=norm), Training(norm=norm)
    expected, _ = busy(host, tmp_path / "host")
    found, _ = busy(device, tmp_path / "device")
    assert_same(found, expected)
    assert_same(device.state(), host.state())
    assert all(device.there)
    assert [1 in blocks for blocks in device.there[9:13]] == [True, False, False, True]


@pytest.mark.parametrize(("count", "norm"), [(1, NO_NORM), (3, NO_NORM), (1, CLIPPED), (3, CLIPPED)])
def test_steps_run_in_exactly_the_memory_of_the_schedule(sim: Simulator, count: int, norm: Mapping[str, Any]):
    torch.accelerator.empty_cache()
    sim.configure(segments=False)
    # Each tensor is a multiple of the 512 bytes to which the allocator rounds.
    plain, one = held_bytes(), Training(memory="30MiB", activations="recompute", width=256, norm=norm)
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


@pytest.mark.parametrize("place", [0, -1])
def test_a_clipped_step_that_fails_at_an_update_there_is_undone_or_completed(sim: Simulator, place: int):
    host, one = Training(is_there=False, norm=CLIPPED), Training(memory="1MiB", norm=CLIPPED)
    for number in range(4):
        expected = host.take(number, count=3)
        there = one.there[-1] if one.there else (0,)
        if number != 2:
            assert torch.equal(one.take(number, count=3), expected)
            continue
        assert 1 < len(there) < 4
        one.compiled.megatrain.engine.set_chaos(Chaos(fail=f"compute:U{there[place]}", max_delay_s=0))
        with pytest.raises(InjectedFailure):
            one.take(number, count=3)
        one.compiled.megatrain.engine.set_chaos(None)
        if place == 0:  # nothing was updated, so the step left no trace
            assert torch.equal(one.take(number, count=3), expected)
        else:
            one.rates.step()
        assert one.step.progress.count == 3
    assert_same(one.state(), host.state())


@pytest.mark.parametrize("norm", [NO_NORM, CLIPPED])
def test_an_update_that_ends_in_the_middle_ends_training(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch, norm: Mapping[str, Any]
):
    from megatrain.optim.fast import on_device

    one, made, fused = Training(norm=norm), list[int](), on_device.fused_update
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


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_there_too(sim: Simulator):
    def nan_in(number: int) -> Any:
        return lambda result, batch: loss_of(result, batch) * (torch.nan if len(one.there) == number else 1.0)

    states: list[list[torch.Tensor]] = []
    for is_there in (False, True):
        one = Training(is_there=is_there, norm={**CLIPPED, "on_nonfinite": "skip"}, loss=nan_in(2))
        for number in range(4):
            one.take(number)
        assert (one.step.progress.count, one.step.progress.skipped) == (4, 1)
        assert str(one.step.progress.nonfinite) == "the gradient of `3.down.bias`, of block 3,"
        assert bool(one.there[-1]) == is_there
        states.append(one.state())
    assert_same(*states)


def test_hooks_on_gradients_of_clipped_steps_leave_all_updates_to_the_host(sim: Simulator):
    one, seen = Training(norm=CLIPPED), list[torch.Tensor]()
    handle = one.model[1].up.bias.register_hook(lambda gradient: seen.append(gradient.clone()))
    one.take(0)
    handle.remove()
    one.take(1)
    assert [bool(there) for there in one.there] == [False, True]
    assert len(seen) == 1


def test_serial_steps_are_updated_by_the_host_alone(sim: Simulator):
    one, why = Training(), "updates wait for all gradients"
    model = nn.Sequential(Block(), Block())
    plan = megatrain.plan(
        model,
        batch(0).cpu(),
        precision="bf16",
        loss=loss_of,
        optimizer="AdamW",
        hardware=SLOW_HOST,
        device_memory="64MiB",
        overlap=False,
    )
    assert f"The host makes all updates: {why}" in plan.why()
    step = megatrain.TrainStep(one.compiled, one.optimizer, loss=loss_of, overlap=False)
    step(batch(0))
    assert step.schedule.device_updates == ()
