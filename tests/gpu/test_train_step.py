"""Whole training steps on an accelerator: numbers, order, failures, and what overlap brings."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import megatrain
from megatrain.runtime.streams.stream_set import Chaos, Recording
from tests.comparing import assert_same
from tests.gpu.test_cuda_training import device, moved
from tests.host_updates import HostUpdates
from tests.models import MODELS

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


@pytest.mark.parametrize("mode", TELLING)
def test_what_runs_is_the_schedule(mode: str) -> None:
    recording = Recording()
    model, _, kwargs = MODELS[LLAMA]()
    compiled = megatrain.compile(model, device=device(), recording=recording)
    step = megatrain.TrainStep(compiled, torch.optim.AdamW(compiled.parameters()), **MODES[mode])
    batch = [{key: moved(value).clone() for key, value in kwargs.items()} for _ in range(2)]
    step(batch)
    recording.clear()
    step(batch)
    for stream in ("h2d", "compute", "d2h", "host"):
        assert recording.labels(stream) == tuple(str(op) for op in step.schedule.ops if op.stream == stream)
    assert compiled.peak_bytes <= step.schedule.peak_bytes


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
