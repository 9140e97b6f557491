"""kernels="graphs": blocks whose kernels are recorded once and launched by one call have the bits of eager's calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import megatrain
from megatrain.errors import EagerKernelsWarning, OptionError, ScheduleError
from megatrain.runtime import replays
from megatrain.runtime.replays import Replays
from tests.comparing import assert_same
from tests.equal_blocks import EqualBlocks
from tests.gpu.test_cuda_training import assert_parity_there, device, moved
from tests.training.parity import MODES, TASKS, adamw

RECORDED = (
    "gpt_loss", "cnn", "stack", "vit_labels", "qwen2", "tied_blocks",
    "block_called_twice", "shared_parameter", "frozen_first", "frozen_bias", "all_frozen", "encoder_decoder", "unet",
    "lengths_read", "custom_function", "ema_buffer", "inplace_input", "autocast_region", "checkpointed",
    "returns_everything", "weight_norm", "spectral_norm",
)  # fmt: skip


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the templates of all recordings, in order."""
    found: list[str] = []
    recorded = Replays._recorded

    def noted(self: Replays, *arguments: Any) -> Any:
        result = recorded(self, *arguments)
        found.append(self._name)
        return result

    monkeypatch.setattr(Replays, "_recorded", noted)
    return found


@pytest.mark.parametrize(
    "name", ["llama_labels", "views", *(pytest.param(name, marks=pytest.mark.nightly) for name in RECORDED)]
)
def test_calls_have_eagers_bits(name: str, made: list[str]):
    assert_parity_there(name, kernels="graphs")
    assert made


def steps_of(
    kernels: str, name: str, mode: str, *, precision: str = "fp32", count: int = 4, **options: Any
) -> tuple[megatrain.CompiledModule, list[Any]]:
    """Steps of two micro-batches, each with other inputs, and all that they leave."""
    task = TASKS[name]
    torch.manual_seed(0)
    model = task.build()
    compiled = megatrain.compile(
        model, device=device(), kernels=kernels, precision=precision, activations="recompute", **options
    )
    step = megatrain.TrainStep(compiled, adamw(model), loss=task.loss, **MODES[mode])
    losses = [step(moved([task.batch(10 * seed + number, 2) for number in range(2)])) for seed in range(count)]
    step.flush()
    found = [loss.item() for loss in losses], [p.detach().clone() for p in model.parameters()], list(model.buffers())
    return compiled, [*found]


@pytest.mark.parametrize(
    ("name", "mode", "precision"),
    [
        ("stack", "deferred", "fp32"),
        ("llama", "deferred", "bf16"),
        *(pytest.param("lora", mode, "fp32", marks=pytest.mark.nightly) for mode in MODES),
    ],
)
def test_training_steps_have_eagers_bits(name: str, mode: str, precision: str, made: list[str]):
    _, expected = steps_of("eager", name, mode, precision=precision)
    compiled, found = steps_of("graphs", name, mode, precision=precision)
    assert_same(expected, found)
    assert made
    assert "kernels graphs" in str(compiled)


def test_a_recording_serves_all_blocks_whose_weights_are_in_the_same_place(made: list[str]):
    model = EqualBlocks(12)
    compiled = megatrain.compile(model, device=device(), kernels="graphs", memory="60KiB")
    step = megatrain.TrainStep(compiled, adamw(model), loss=lambda y, _: y.square().mean())
    for seed in range(4):
        step(batch(seed))
    # A forward and a backward for each slot, and those of the first block, whose input needs no gradient.
    assert 0 < len(made) <= 2 * (step.schedule.num_slots + 1) <= 8


TAKEN = r'Recorded kernels take 2\d\.\d\d KiB of the 20\.00 KiB(.|\n)*or kernels="eager"'


def test_a_budget_that_recordings_take_up_is_refused_with_what_they_take():
    compiled = compiled_of(EqualBlocks(12), memory="20KiB", chunking="never")
    with pytest.raises(ScheduleError, match=TAKEN):
        compiled(batch(0))
    step = megatrain.TrainStep(compiled, adamw(compiled), loss=lambda y, _: y.square().mean())
    with pytest.raises(ScheduleError, match=TAKEN):
        step(batch(0))


def test_a_given_plan_leaves_recordings_their_memory():
    eager = megatrain.compile(EqualBlocks(12), device=device(), activations="recompute", memory="40KiB")
    step = megatrain.TrainStep(eager, adamw(eager), loss=lambda y, _: y.square().mean())
    step(batch(0))
    compiled = compiled_of(EqualBlocks(12), memory="40KiB")
    planned = megatrain.TrainStep(compiled, adamw(compiled), loss=lambda y, _: y.square().mean(), plan=step.plan)
    with pytest.raises(ScheduleError, match="memory of the device, without that of recorded kernels"):
        planned(batch(0))


def batch(seed: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)).to(device())


def compiled_of(model: nn.Module, **options: Any) -> megatrain.CompiledModule:
    return megatrain.compile(model, device=device(), kernels="graphs", **options)


def eager_of(model: nn.Module) -> megatrain.CompiledModule:
    return megatrain.compile(model, device=device(), activations="recompute")


def gradients_after(compiled: megatrain.CompiledModule, seeds: Sequence[int]) -> list[torch.Tensor]:
    compiled.zero_grad()
    for seed in seeds:
        compiled(batch(seed)).square().mean().backward()
    return [p.grad.clone() for p in compiled.parameters() if p.grad is not None]


def test_other_settings_of_torch_make_other_recordings(made: list[str]):
    compiled = compiled_of(EqualBlocks())
    gradients_after(compiled, [0, 1])
    count = len(made)
    gradients_after(compiled, [2])
    assert len(made) == count > 0
    torch.backends.cuda.enable_math_sdp(False)
    try:
        gradients_after(compiled, [3, 4])
    finally:
        torch.backends.cuda.enable_math_sdp(True)
    assert len(made) == 2 * count
    gradients_after(compiled, [5])
    assert len(made) == 2 * count


def test_the_callers_hooks_see_no_recorded_kernels(made: list[str]):
    expected, compiled = eager_of(EqualBlocks()), compiled_of(EqualBlocks())
    for call in (expected, compiled):
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            for seed in range(3):
                call(batch(seed)).square().mean().backward()
    assert made == []
    grads = [[p.grad for p in call.parameters()] for call in (expected, compiled)]
    assert_same(grads[0], grads[1])


class Reads(nn.Module):
    """Reads a value in mid-step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > -1e9 else x


class FromHost(nn.Module):
    """Copies a number of the host to the device, for which the host waits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(32 * 1024.0).reshape(32, 1024).sum(1).to(x.device)


class OwnDraws(torch.autograd.Function):
    """Its backward draws numbers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        del ctx
        return gradients[0] * torch.rand_like(gradients[0])


class DrawsTwice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: Any = OwnDraws.apply(F.dropout(x, 0.5))
        return result


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (Reads(), "compares values with those of the capture"),
        (FromHost(), "on the host|record"),
        (DrawsTwice(), "autograd.Function may draw others"),
    ],
)
def test_blocks_that_cannot_be_recorded_run_as_before_and_say_so(extra: nn.Module, reason: str):
    expected = eager_of(EqualBlocks(extra=extra))
    torch.manual_seed(3)
    wanted = gradients_after(expected, [0, 1, 2])
    compiled = compiled_of(EqualBlocks(extra=extra))
    torch.manual_seed(3)
    with pytest.warns(EagerKernelsWarning, match=reason):
        found = gradients_after(compiled, [0, 1, 2])
    assert_same(wanted, found)
    assert "on eager's kernels" in str(compiled)


def test_a_device_without_recordings_and_retained_graphs_are_refused():
    with pytest.raises(OptionError, match=r'kernels="graphs" is impossible on cpu'):
        megatrain.compile(EqualBlocks(), device="cpu", kernels="graphs")
    with pytest.raises(OptionError, match='activations="keep" is impossible'):
        compiled_of(EqualBlocks(), activations="keep")


@pytest.mark.parametrize("fault", ["arguments aren't copied in", "results aren't copied out", "one recording for all"])
def test_these_tests_notice(fault: str, monkeypatch: pytest.MonkeyPatch):
    wanted = gradients_after(eager_of(EqualBlocks(6)), [0, 1, 2])
    recording = replays._Recording
    if fault == "arguments aren't copied in":
        monkeypatch.setattr(recording, "fill", lambda self, arguments: None)
    elif fault == "results aren't copied out":
        monkeypatch.setattr(
            recording, "results", lambda self, arguments, state: [r and r.of(r.memory) for r in self.found]
        )
    else:
        run = Replays.run
        monkeypatch.setattr(Replays, "run", lambda self, work, given, state, key: run(self, work, given, (), key))
    found = gradients_after(compiled_of(EqualBlocks(6)), [0, 1, 2])
    assert any(not torch.equal(*pair) for pair in zip(wanted, found, strict=True))
