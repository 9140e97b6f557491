"""TorchScript on an accelerator, whose fused kernels would read the memory that tensors without values lack."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megatrain
from megatrain.torch_private import FakeTensorMode
from megatrain.tracer.capture.scripts import scripts_on_values
from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")


def gate(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) + x


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(3, 3), torch.jit.script(gate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(self.layer(x))


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Gated(), Gated())


def test_a_scripted_function_needs_values(sim: Simulator):
    function = torch.jit.script(gate)
    real = torch.ones(2, device=DEVICE)
    with FakeTensorMode() as mode, scripts_on_values():
        assert function(torch.ones(2)).shape == (2,)
        with pytest.raises(RuntimeError, match="`gate` may be fused, and needs tensors with values"):
            function(mode.from_tensor(real))
    with scripts_on_values():
        assert torch.equal(function(real).cpu(), torch.full((2,), 2.0))


def test_a_module_with_torchscript_trains_as_in_eager(sim: Simulator):
    sim.order("late")
    model, eager = made(), made().to(DEVICE)
    compiled = megatrain.compile(model, device=DEVICE)
    x = torch.randn(2, 3, device=DEVICE)
    for _ in range(2):
        expected, found = eager(x), compiled(x)
        expected.sum().backward()
        found.sum().backward()
        assert torch.equal(found, expected)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad.cpu())
