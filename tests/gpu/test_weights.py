"""Weights read from files, on an accelerator: the store is page-locked after it was filled."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import megatrain
from megatrain.device import Device, find
from tests.comparing import assert_same
from tests.runtime.parity import train
from tests.runtime.saved import save, state_of


def stack() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)))


def test_a_model_on_meta_trains_as_the_same_model_with_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = stack()
    file = save(tmp_path / "model.safetensors", state_of(reference))
    with torch.device("meta"):
        model = stack()
    device = torch.accelerator.current_accelerator()
    batch = torch.randn(32, 256, device=device)
    loaded = megatrain.compile(reference, device=device, memory="4MiB")
    compiled = megatrain.compile(model, device=device, memory="4MiB", weights=file)
    assert_same(train(loaded, reference, (batch,), {}), train(compiled, model, (batch,), {}))
    locks = type(find(None)).lock is not Device.lock
    assert all(p.is_pinned() == locks for p in model.parameters())
