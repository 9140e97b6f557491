"""Whole training steps on an accelerator: numbers, order, failures, and what overlap brings."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.optim.norm import GradientNorm
from megatrain.runtime.streams.stream_set import Chaos
from megatrain.training.trainer import Running
from tests.comparing import assert_same
from tests.gpu.test_cuda_training import device, moved
from tests.host_updates import HostUpdates
from tests.models import MODELS
from tests.training.parity import adamw

MODES = {
    "overlap": {"spread": False},
    "spread": {},
    "deferred": {"max_grad_norm": 0.1},
    "serial": {"max_grad_norm": 0.1, "overlap": False},
}
TELLING = ["spread", "deferred", *(pytest.param(mode, marks=pytest.mark.nightly) for mode in ("overlap", "serial"))]
LLAMA = "llama_labels"


def loop(name: str, steps: int, clip: float | None) -> tuple[list[float], list[torch.Tensor]]:
    """Trains in eager PyTorch on the accelerator; updates run on the host."""
    model, _, kwargs = MODELS[name]()
    model.to(device())
    updates = HostUpdates(model.parameters(), lambda copies: torch.optim.AdamW(copies, lr=1e-3, foreach=False))
    losses: list[float] = []
    for _ in range(steps):
        model.zero_grad()
        loss = model(**moved(kwargs)).loss
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        updates.step()
        losses.append(loss.item())
    return losses, [p.detach().cpu() for p in model.parameters()]


def streamed(name: str, steps: int, mode: str, **options: Any) -> tuple[list[float], list[torch.Tensor]]:
    model, _, kwargs = MODELS[name]()
    compiled = megatrain.compile(model, device=device(), **options)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3, foreach=False)
    step = megatrain.TrainStep(compiled, optimizer, **MODES[mode])
    losses = [step(moved(kwargs)).item() for _ in range(steps)]
    return losses, [p.detach().clone() for p in compiled.parameters()]


@pytest.mark.parametrize("mode", TELLING)
def test_steps_equal_the_loop(mode: str) -> None:
    torch.manual_seed(0)
    losses, parameters = loop(LLAMA, 10, MODES[mode].get("max_grad_norm"))
    torch.manual_seed(0)
    found, others = streamed(LLAMA, 10, mode)
    if mode in ("overlap", "spread"):
        assert losses == found
        assert_same(parameters, others)
        return
    # The norm of all gradients is summed on the host here and on the device there, and with it clipping rounds
    # otherwise; where a moment is near zero, AdamW's quotients differ by as much as the step itself.
    assert losses == pytest.approx(found, rel=2e-4)
    for parameter, other in zip(parameters, others, strict=True):
        assert (parameter - other).abs().max() <= 2 * 10 * 1e-3
        assert (parameter - other).abs().mean() <= 1e-4


@pytest.mark.parametrize("mode", TELLING[1:])
def test_a_failure_in_each_kind_of_operation_leaves_a_step_boundary(mode: str) -> None:
    model, _, kwargs = MODELS[LLAMA]()
    compiled = megatrain.compile(model, device=device())
    step = megatrain.TrainStep(compiled, torch.optim.AdamW(compiled.parameters(), fused=True), **MODES[mode])
    batch = moved(kwargs)
    step(batch)
    step(batch)
    for what in dict.fromkeys(op.what for op in step.schedule.ops):
        op = next(op for op in step.schedule.ops if op.what == what)
        step.flush()
        before, count = copy.deepcopy(model.state_dict()), step.progress.count
        compiled.megatrain.engine.set_chaos(Chaos(fail=f"{op.stream}:{op}", max_delay_s=0))
        with pytest.raises((megatrain.ExecuteError, RuntimeError)):  # noqa: PT012  # the first leaves updates due
            step(batch)
            step(batch)
        compiled.megatrain.engine.set_chaos(None)
        step.flush()
        assert step.progress.count - count in (0, 1)
        if step.progress.count == count:
            assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
        step(batch)


def normed_model() -> nn.Sequential:
    """Layers of more elements than a host sums at once, two of which share a weight."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(400, 400), nn.Tanh()) for _ in range(4)]
    layers[2][0].weight = layers[0][0].weight
    return nn.Sequential(*layers)


def hooked(model: nn.Sequential) -> None:
    model.get_parameter("1.0.weight").register_hook(lambda gradient: 2 * gradient)


@pytest.mark.parametrize("mode", ["deferred", "overlap"])
def test_the_device_takes_the_norms_of_gradients_that_are_whole_there(mode: str, monkeypatch: pytest.MonkeyPatch):
    read, heard = list[torch.Size](), dict[str, torch.Tensor]()
    hear = Running.hear_norm
    monkeypatch.setattr(
        Running, "hear_norm", lambda self, key, norm: hear(self, key, heard.setdefault(key, norm.clone()))
    )
    monkeypatch.setattr(
        GradientNorm, "_sums", lambda self, given: read.extend(g.shape for g in given.values() if g is not None) or {}
    )
    batches = [torch.randn(3, 400) for _ in range(2)]
    eager = normed_model().to(device())
    hooked(eager)
    torch.stack([eager(moved(x)).square().mean() for x in batches]).mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.1)
    model = normed_model()
    hooked(model)
    compiled = megatrain.compile(model, device=device(), block_bytes=1)
    options = MODES[mode] | {"report_norm": True}
    step = megatrain.TrainStep(compiled, adamw(model), loss=lambda out, _: out.square().mean(), **options)
    step([moved(x) for x in batches])
    assert step.progress.grad_norm is not None
    assert step.progress.grad_norm.item() == pytest.approx(expected.item(), rel=1e-6)
    by_name = {name: parameter.grad for name, parameter in eager.named_parameters()}
    assert heard.keys() == by_name.keys() - {"0.0.weight"}
    for name in heard.keys() - {"1.0.weight"}:
        gradient = by_name[name]
        assert gradient is not None
        (norm,) = torch._foreach_norm([gradient], 2.0)  # as `clip_grad_norm_` calls it
        assert_same(norm.cpu(), heard[name], name)
    # The sum of two blocks' gradients is the host's, and so is what a hook makes of a gradient.
    assert read == [torch.Size([400, 400])] * 2
    # The plan knows of the sum, of which two blocks have a part, but not of hooks.
    partial = [block.partial_gradient_bytes for block in step.schedule.known_workload().blocks]
    assert sum(partial) == 2 * 4 * 400 * 400


def test_a_norm_of_the_device_that_isnt_finite_says_whose_gradient():
    model = normed_model()
    compiled = megatrain.compile(model, device=device(), block_bytes=1)
    options = {"max_grad_norm": 0.1, "on_nonfinite": "skip"}
    step = megatrain.TrainStep(compiled, adamw(model), loss=lambda out, _: out.square().mean(), **options)
    before = copy.deepcopy(model.state_dict())
    step(moved(torch.full((3, 400), torch.nan)))
    assert step.progress.skipped == 1
    assert "`3.0." in str(step.progress.nonfinite)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
