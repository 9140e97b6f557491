"""Memory of the host on an accelerator: page-locked arenas, weights from files, fp32 masters of bf16 compute."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.device import Device, find
from megatrain.errors import ExecuteError
from megatrain.runtime.streams.stream_set import Event, StreamSet
from tests.comparing import assert_same
from tests.gpu.test_cuda_training import device
from tests.optim.reference import Loop, Reference, values_of
from tests.runtime.parity import seeded, train
from tests.runtime.saved import save, state_of


def stack() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def assert_locked(model: nn.Module) -> None:
    """Parameters are page-locked on a device that locks."""
    locks = type(find(None)).lock is not Device.lock
    assert all(p.is_pinned() == locks for p in model.parameters())


def test_a_model_on_meta_trains_as_the_same_model_with_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = stack()
    file = save(tmp_path / "model.safetensors", state_of(reference))
    with torch.device("meta"):
        model = stack()
    batch = torch.randn(32, 256, device=device())
    loaded = megatrain.compile(reference, device=device(), memory="4MiB")
    compiled = megatrain.compile(model, device=device(), memory="4MiB", weights=file)
    assert_same(train(loaded, reference, (batch,), {}), train(compiled, model, (batch,), {}))
    assert_locked(model)


def test_training_equals_fp32_masters_with_bf16_compute() -> None:
    model = seeded(stack)
    x = torch.randn(32, 256, device=device())
    reference = Reference(model, sgd, device())
    loop = Loop(model, megatrain.compile(model, device=device(), precision="bf16", memory="2MiB"), sgd)
    for _ in range(10):
        expected, found = reference.step((x,), {}), loop.step((x,), {})
        assert abs(expected - found) <= 1e-2 * abs(expected)
    assert_locked(model)
    # Weights lie on other boundaries in a slot than in eager, so another kernel may serve: bf16 gradients then differ
    # by a few of their roundings, and with them the updates.
    start = dict(seeded(stack).named_parameters())
    for name, values in values_of(loop.compiled).items():
        moved = (reference.masters[name] - start[name]).abs().max()
        assert (values - reference.masters[name]).abs().max() <= 5e-2 * moved
        assert loop.compiled.masters[dict(model.named_parameters())[name]].low.any()


def test_a_failure_leaves_the_device_usable() -> None:
    streams = StreamSet(find(None))
    too_large: Any = partial(torch.empty, 1 << 62, device=device())
    fits: Any = partial(torch.ones, 3, device=device())
    for _ in range(3):
        streams.submit("h2d", "W0", too_large, (), Event("W0"))
        with pytest.raises(ExecuteError, match="h2d:W0 failed"):
            streams.finish()
        with streams.step():
            streams.submit("d2h", "G0", lambda: fits().to("cpu"), (), Event("G0"))
    streams.close()
