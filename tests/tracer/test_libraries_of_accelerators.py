"""What torch's libraries for accelerators do besides computing: a capture leaves weights where they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megatrain
from megatrain.tracer.recording.effect_watch import EffectWatch
from tests.models import MODELS


@pytest.mark.parametrize("opaque", ["refuse", "allow"])
def test_weights_of_an_rnn_keep_their_layout(opaque: str, monkeypatch: pytest.MonkeyPatch):
    model, args, kwargs = MODELS["lstm"]()
    if opaque == "allow":
        model.lstm.register_forward_hook(lambda module, given, result: result[0].sum().item() and None)

    def flatten(module: nn.RNNBase) -> None:
        raise AssertionError("cuDNN would move the weights out of their slot")

    compiled = megatrain.compile(model, device="cpu", transfer="copy", opaque=opaque)
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten)
    for _ in range(2):
        compiled(*args, **kwargs)[0].sum().backward()


def test_a_tensor_that_takes_over_a_storage_writes_nothing_into_it():
    weight = torch.ones(3)
    watch = EffectWatch(lambda _: None, lambda _: None, lambda call: (call(), False))
    with watch:
        torch.empty(0).set_(weight.untyped_storage())
        assert not watch.written
        weight.set_(torch.zeros(3))
        assert watch.written == [weight]


class Asks(nn.Module):
    """Fails where TorchScript may run kernels that it has fused."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not torch._C._get_graph_executor_optimize()
        return self.layer(x)


def test_a_capture_runs_nothing_that_torchscript_has_fused():
    megatrain.compile(Asks(), device="cpu", opaque="refuse").prepare(torch.ones(2, 3))
    assert torch._C._get_graph_executor_optimize()
