"""Kernels of Triton on an accelerator, whose backward autograd runs on a thread of its own."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from megatrain.passes.interpret import exact_fakes
from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import DEVICE
from tests.stand_in_triton import JITFunction, Scaled, Scaling, assert_bits_of_eager, in_layers, stand_in_triton

threads = set[int]()


def scale(x: torch.Tensor, weight: torch.Tensor, made: torch.Tensor) -> None:
    threads.add(threading.get_ident())
    made.copy_(x * weight)


scaling = JITFunction(scale)


def test_a_backward_without_values_launches_nothing(sim: Simulator, monkeypatch: pytest.MonkeyPatch):
    stand_in_triton(monkeypatch)
    calls: list[Any] = [lambda x, weight, made: made.copy_(x), scaling[(1,)]]
    with exact_fakes():
        x = torch.ones(2, device=DEVICE).requires_grad_()
        result: Any = Scaled.apply(x, x.detach(), lambda *given: calls.pop(0)(*given))
        with pytest.raises(RuntimeError, match="the Triton kernel `scale` needs tensors with values"):
            torch.autograd.grad(result.sum(), [x])


def test_a_model_with_kernels_trains_as_in_eager(sim: Simulator, monkeypatch: pytest.MonkeyPatch):
    sim.order("late")
    stand_in_triton(monkeypatch)
    threads.clear()
    assert_bits_of_eager(in_layers(3, lambda: Scaling(scaling[(1,)])), torch.randn(2, 3), DEVICE)
    assert len(threads) > 1, "an eager backward launches from a thread of autograd's"
